"""What the scripts pass on: the seed, the checkpoint to start from, the trained weights."""

import importlib
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.once import Chain
from tests.parallel import jobs
from tests.scripts import read_json, run_script

SCRIPTS = [
    *("model_pretrain", "model_finetune"),
    *("examples.vit.model_pretrain", "examples.vit.model_finetune"),
]


pytestmark = pytest.mark.usefixtures("megatron")


def what_a_seed_decides(script: str, folder: Path, seed: int) -> dict[str, Any]:
    from megakit.data import EpochIndex

    module_of_script: Any = importlib.import_module(script)
    stage = "pretrain" if script.endswith("pretrain") else "finetune"
    chosen = getattr(module_of_script, f"{stage.title()}Options")(
        output_dir=folder, dataset="digits", seed=seed
    )
    planned = getattr(module_of_script, stage.upper())
    run = jobs.make_run(planned, chosen, jobs.layout())
    module, data, _ = jobs.built_by(getattr(module_of_script, stage), run)
    module.configure_model()
    data.setup("fit")
    weights = {name: w.detach() for name, w in module.module.named_parameters() if w.dim() > 1}
    order = torch.tensor([data.train_set[index]["idx"] for index in range(50)])
    indices = np.arange(50)
    batch = data.train_set.dataset.get_batch(EpochIndex(np.zeros_like(indices), indices))
    # What the model is given of the first 50 images, in the order of the file.
    return weights | {"order": order, "images": batch.get("corrupted", batch["data"])}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_seed_decides_weights_order_and_random_effects(tmp_path: Path, script: str) -> None:
    one, again, other = (what_a_seed_decides(script, tmp_path, seed) for seed in (1, 1, 2))
    for name, value in one.items():
        assert torch.equal(value, again[name]), name
        has_no_effect = (script, name) == ("model_finetune", "images")  # images as they are
        assert torch.equal(value, other[name]) == has_no_effect, name


@pytest.mark.long
def test_fine_tuning_starts_from_the_best_of_pretraining(
    chain: Chain, tmp_path: Path, components: ModuleType
):
    """With a rate that changes nothing; with few labels the last checkpoint counts."""
    from megakit.models import load_for_inference

    shutil.copytree(chain.runs / "pretrain", tmp_path / "pretrain")
    still = ("--lr", 1e-12, "--max-steps", 2, "--val-interval", 1, "--save-interval", 1)
    options = ("--num-labels", 100, "--precision", 32, "--output-dir", tmp_path)
    run_script("model_finetune.py", *still, *options).output()
    summary = read_json(tmp_path / "finetune" / "summary.json")
    assert summary["checkpoint"] == summary["last_checkpoint"]
    assert summary["checkpoint"].endswith("/step=000002")
    best = Path(read_json(chain.runs / "pretrain" / "summary.json")["checkpoint"])
    pretrained = load_for_inference(best, components.PretrainConfig()).state_dict()
    finetuned = load_for_inference(summary["checkpoint"]).state_dict()
    trunk = [name for name in pretrained if name.startswith(("linear1.", "linear2."))]
    assert len(trunk) == 4
    for name in trunk:
        assert np.allclose(finetuned[name], pretrained[name], rtol=0, atol=1e-6), name
