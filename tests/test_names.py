"""The names that code of readers and of the published documents imports, and where they are."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
from typing import Any

import pytest

from tests.scripts import REPOSITORY

pytestmark = pytest.mark.usefixtures("megatron")

NAMES = {
    "model_components": (
        *("SameSizeLossDict", "MSELossReduction", "ClassifierLossReduction", "MnistItem"),
        *("MNISTCustom", "MNISTDataModule", "ExampleModelOutput", "ExampleModelTrunk"),
        *("PretrainModel", "ExampleFineTuneModel", "ExampleGenericConfig", "PretrainConfig"),
        *("ExampleFineTuneConfig", "BionemoLightningModule", "MetricTracker"),
    ),
    "megakit": ("CACHE_DIR",),
    "megakit.data": (
        *("EpochIndex", "SizedDataset", "MultiEpochDataset", "MultiEpochDatasetResampler"),
        *("MultiEpochDatasetWrapper", "IdentityMultiEpochDatasetWrapper", "PRNGResampleDataset"),
        *("permute", "MegatronDataModule", "WrappedDataLoader"),
    ),
    "megakit.models": (
        *("MegatronBioNeMoTrainableModelConfig", "OVERRIDE_BIONEMO_CONFIG_DEFAULTS"),
        *("IOMixinWithGettersSetters", "MegatronLossType", "load_for_inference"),
    ),
    "megakit.training": (
        *("LightningPassthroughPredictionMixin", "PassthroughLossReduction", "train"),
    ),
    "megakit.testing": (
        *("assert_dataset_compatible_with_megatron", "assert_dataset_elements_not_equal"),
        "distributed_model_parallel_state",
    ),
    "megakit.runtime": ("use_accelerator",),
}
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


def find(name: str) -> Any:
    module, _, name_in_module = name.rpartition(".")
    return getattr(importlib.import_module(module), name_in_module, None)


def test_names() -> None:
    wanted = [f"{module}.{name}" for module, names in NAMES.items() for name in names]
    assert [name for name in wanted if find(name) is None] == []


def exists(name: str) -> bool:
    try:
        return bool(pkgutil.resolve_name(name))
    except (AttributeError, ImportError):
        return False


def test_names_in_pages_and_docstrings() -> None:
    paths = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    paths += REPOSITORY.glob("megakit/**/*.py")
    texts = "\n".join(path.read_text() for path in paths)
    names = sorted(set(re.findall(r"`(megakit(?:\.\w+)+)", texts)))
    assert len(names) > 15
    assert [name for name in names if not exists(name)] == []


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    found = inspect.signature(find(name)).parameters
    assert list(found)[: len(PARAMETERS[name])] == PARAMETERS[name]


def test_fields_of_the_configs() -> None:
    from model_components import ExampleFineTuneConfig, PretrainConfig

    for config in (PretrainConfig(), ExampleFineTuneConfig()):
        fields = {field.name for field in dataclasses.fields(config)}
        assert {"hidden_size", "latent_size", "initial_ckpt_path"} <= fields
        assert "initial_ckpt_skip_keys_with_these_prefixes" in fields
        assert (config.hidden_size, config.latent_size) == (64, 3)
