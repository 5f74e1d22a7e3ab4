"""What the training scripts pass on: the seed, the checkpoint to start from."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel import jobs

PRETRAINING = ["model_pretrain", "examples.vit.model_pretrain"]
FINETUNING = ["model_finetune", "examples.vit.model_finetune"]


pytestmark = pytest.mark.usefixtures("megatron")


def built(script: str, folder: Path, start: str | None = None, **options: Any) -> tuple[Any, Any]:
    """The Lightning module, with its model, and the data module that a script trains with."""
    module_of_script: Any = importlib.import_module(script)
    stage = "pretrain" if script.endswith("pretrain") else "finetune"
    chosen = getattr(module_of_script, f"{stage.title()}Options")(
        output_dir=folder, dataset="digits", **options
    )
    planned = getattr(module_of_script, stage.upper())
    run = jobs.make_run(planned, chosen, jobs.layout(), start)
    module, data, _ = jobs.built_by(getattr(module_of_script, stage), run)
    module.configure_model()
    data.setup("fit")
    return module, data


def what_a_seed_decides(script: str, folder: Path, seed: int) -> dict[str, Any]:
    from megakit.data import EpochIndex

    module, data = built(script, folder, seed=seed)
    weights = {name: w.detach() for name, w in module.module.named_parameters() if w.dim() > 1}
    order = torch.tensor([data.train_set[index]["idx"] for index in range(50)])
    indices = np.arange(50)
    batch = data.train_set.dataset.get_batch(EpochIndex(np.zeros_like(indices), indices))
    # What the model is given of the first 50 images, in the order of the file.
    return weights | {"order": order, "images": batch.get("corrupted", batch["data"])}


@pytest.mark.parametrize("script", PRETRAINING + FINETUNING)
def test_a_seed_decides_weights_order_and_random_effects(tmp_path: Path, script: str) -> None:
    one, again, other = (what_a_seed_decides(script, tmp_path, seed) for seed in (1, 1, 2))
    for name, value in one.items():
        assert torch.equal(value, again[name]), name
        has_no_effect = (script, name) == ("model_finetune", "images")  # images as they are
        assert torch.equal(value, other[name]) == has_no_effect, name


@pytest.mark.parametrize(("pretrain", "finetune"), zip(PRETRAINING, FINETUNING, strict=True))
def test_fine_tuning_starts_from_the_checkpoint(
    tmp_path: Path, pretrain: str, finetune: str
) -> None:
    from tests.megakit.models.networks import save_checkpoint, weights

    pretrained, _ = built(pretrain, tmp_path, seed=1)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", pretrained.module)
    expected = weights(pretrained.module)
    fresh, _ = built(finetune, tmp_path, seed=2)
    started, _ = built(finetune, tmp_path, str(checkpoint), seed=2)
    own, fresh_weights = weights(started.module), weights(fresh.module)
    shared = own.keys() & expected.keys()
    assert len(shared) >= 4
    for name, weight in own.items():
        assert torch.equal(weight, (expected if name in shared else fresh_weights)[name]), name
    assert not all(torch.equal(fresh_weights[name], expected[name]) for name in shared)
