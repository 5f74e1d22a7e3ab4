"""What code of readers and the published documents uses; its imports: docs/test_code_blocks.py."""

import dataclasses
import inspect
import pkgutil
import re
from typing import Any

import pytest

from tests.scripts import REPOSITORY

pytestmark = pytest.mark.usefixtures("megatron")

#: Parameters of the documents, in their order; further ones may follow.
PARAMETERS = {
    "model_components.MNISTDataModule": ["data_dir", "batch_size", "output_log"],
    "model_components.MNISTCustom": ["root", "train", "transform"],
    "model_components.MetricTracker": ["metrics_to_track_val", "metrics_to_track_train"],
    "megakit.data.PRNGResampleDataset": ["dataset", "seed", "num_samples"],
    "megakit.data.MultiEpochDatasetResampler": ["dataset", "num_epochs", "num_samples", "shuffle"],
    "megakit.data.permute": ["index", "length", "seed"],
    "megakit.training.train": ["model", "data", "trainer", "log", "resume"],
}


def resolve(name: str) -> Any:
    """What a dotted name stands for; None if there is no such thing."""
    try:
        return pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return None


def test_names_in_pages_and_docstrings() -> None:
    paths = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    paths += REPOSITORY.glob("megakit/**/*.py")
    texts = "\n".join(path.read_text() for path in paths)
    names = sorted(set(re.findall(r"`(megakit(?:\.\w+)+)", texts)))
    assert len(names) > 15
    assert [name for name in names if resolve(name) is None] == []


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    found = inspect.signature(resolve(name)).parameters
    assert list(found)[: len(PARAMETERS[name])] == PARAMETERS[name]


def test_fields_of_the_configs() -> None:
    from model_components import ExampleFineTuneConfig, PretrainConfig

    for config in (PretrainConfig(), ExampleFineTuneConfig()):
        fields = {field.name for field in dataclasses.fields(config)}
        assert {"hidden_size", "latent_size", "initial_ckpt_path"} <= fields
        assert "initial_ckpt_skip_keys_with_these_prefixes" in fields
        assert (config.hidden_size, config.latent_size) == (64, 3)
