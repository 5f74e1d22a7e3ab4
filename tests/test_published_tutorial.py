"""The published tutorial's three scripts, mended, on this library: what was written for it, runs.

Its code is taken out of ../shared/spec where that is there, and runs without
`if __name__ == "__main__":`. Each rule below (reason, pattern, replacement) moves an import,
repairs an error, shortens a run or lets it tell more, and fails if it finds nothing to change.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import blocks
from tests.scripts import REPOSITORY, Result, run_python

TUTORIAL = REPOSITORY.parent / "shared" / "spec" / "mnist_tutorial.md"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not TUTORIAL.is_file(), reason="no ../shared/spec/mnist_tutorial.md"),
]
STEPS = 12
INTERVAL = 4


# --- What the scripts tell the test ---------------------------------------------------------------

LINEAR1 = """
def linear1(module):
    (found,) = (w for name, w in module.named_parameters() if name.endswith("linear1.weight"))
    return found.float().tolist()
"""
TELL_WEIGHTS_BEFORE = (
    "before = []\n"
    "metric_tracker.on_train_start = lambda _, module: before.extend(linear1(module))\n"
)
TELL_OF_TRAINING = """
import json
print(json.dumps({
    "checkpoint": checkpoint_callback.last_model_path.removesuffix(".ckpt"),
    "losses": metric_tracker.collection_train["loss"].tolist(),
    "validations": metric_tracker.collection_val["logged_metrics"],
    "before": before,
    "after": linear1(MODULE),
}, default=float))
"""
TELL_OF_PREDICTION = """
import json
import torch
bare = isinstance(results[0], torch.Tensor)
print(json.dumps({
    "after": linear1(lightning_module3),
    "logits": torch.cat([r if bare else r["output"] for r in results]).tolist(),
    "idx": None if bare else torch.cat([r["idx"] for r in results]).tolist(),
}))
"""

# --- What its reader has to change: imports, the accelerator, one call at the start ---------------

MOVED = [
    ("one Lightning namespace", r"\bpytorch_lightning\b", "lightning.pytorch"),
    ("moved", r"bionemo\.llm\.utils import iomixin_utils", "megakit import models"),
]
COMPONENTS_MOVED = [
    *MOVED,
    ("moved", r"bionemo\.core\.data\.resamplers", "megakit.data"),
    ("moved", r"bionemo\.llm\.api", "megakit.models"),
    ("moved", r"bionemo\.llm\.lightning", "megakit.training"),
    ("moved", r"bionemo\.llm\.model\.config", "megakit.models"),
]
FIRST_CALL = 'from megakit.runtime import use_accelerator\nuse_accelerator("cpu")\n'
SCRIPTS_MOVED = [
    *MOVED,
    ("moved", r"bionemo\.core import BIONEMO_CACHE_DIR", "megakit import CACHE_DIR"),
    ("renamed", r"BIONEMO_CACHE_DIR", "CACHE_DIR"),
    ("llm brings 70 packages", r"nemo\.collections import llm", "megakit.training import train"),
    ("no GPU", r'accelerator="gpu"', 'accelerator="cpu"'),
    ("the first call", r"\A", FIRST_CALL),
]
TRAINING_MOVED = [
    ("renamed", r"\bllm\.train\(", "train("),
    ("for the test", r"^train\(", TELL_WEIGHTS_BEFORE + "train("),
    ("short", r"max_steps=\d+", f"max_steps={STEPS}"),
    ("short", r"(every_n_train_steps|check_interval|every_n_steps)=\d+", rf"\1={INTERVAL}"),
]

# --- Its errors -----------------------------------------------------------------------------------

COMPONENTS_MENDED = [
    ("MetricTracker uses it", r"\A", "from collections import defaultdict\n"),
    (
        "names neither model nor loss, so it has no model, and the autoencoder's loss",
        r"(class ExampleFineTuneConfig\([^:]*:\n)",
        r"\1    model_cls: Type[ExampleFineTuneModel] = ExampleFineTuneModel\n"
        r"    loss_cls: Type[ClassifierLossReduction] = ClassifierLossReduction\n",
    ),
]
NO_FOLDER = "a TemporaryDirectory has no `/`, and is gone before the next script reads from it"
SCRIPTS_MENDED = [
    ("used, not imported", r"\A", "import sys\nfrom pathlib import Path\n"),
    ("for the test", r"\A", LINEAR1),
    (NO_FOLDER, r"tempfile\.TemporaryDirectory\(\)", 'Path("runs").absolute()'),
]
CONFIG = ("used, not imported", r"\bPretrainConfig, ", r"\g<0>ExampleFineTuneConfig, ")
OTHERS = "another process's"
FINETUNE_MENDED = [
    CONFIG,
    (OTHERS, r"^(lightning_module2 =)", r"pretrain_ckpt_dirpath = sys.argv[1]\n\1"),
    ("a parenthesis is missing", r'(finetune_dir = Path\(.*""\))', r"\1)"),
]
PREDICT_MENDED = [
    CONFIG,
    (OTHERS, r"^(lightning_module3 =)", r"finetune_dir = sys.argv[1]\n\1"),
    ("a parenthesis too many", r"=finetune_dir\)", "=finetune_dir"),
    ("no mnist_test before", r"^(new_data_module =)", 'data_module.setup("predict")\n\\1'),
]


def apply(rules: list[tuple[str, str, str]], code: str) -> str:
    for reason, pattern, replacement in rules:
        code, count = re.subn(pattern, replacement, code, flags=re.MULTILINE)
        assert count, f"nothing to change ({reason}): {pattern}"
    return code


def published() -> tuple[str, dict[str, str]]:
    """The code of the components, and of the three scripts, mended."""
    found = blocks(TUTORIAL.read_text(), "python")

    def position(text: str) -> int:
        (place,) = [number for number, block in enumerate(found) if text in block]
        return place

    start = position("from model_components import")
    components = found[:start]
    # The losses mention MnistItem, which comes after them.
    components.insert(1, components.pop(position("class MnistItem")))
    before_trainer = found[start : position("metric_tracker = ")]
    before_training = found[start : position("metric_tracker = ") + 1]
    tells = {n: TELL_OF_TRAINING.replace("MODULE", f"lightning_module{n}") for n in ("", "2")}
    training = position("#This trains the model")
    scripts = {
        "pretrain": [*before_training, *found[training : training + 2], tells[""]],
        "finetune": [*before_training, found[position("lightning_module2")], tells["2"]],
        "predict": [*before_trainer, found[position("lightning_module3")], TELL_OF_PREDICTION],
    }
    mended = {
        "pretrain": TRAINING_MOVED,
        "finetune": TRAINING_MOVED + FINETUNE_MENDED,
        "predict": PREDICT_MENDED,
    }
    every = SCRIPTS_MENDED + SCRIPTS_MOVED
    whole = {stage: apply(mended[stage] + every, "\n".join(scripts[stage])) for stage in scripts}
    return apply(COMPONENTS_MOVED + COMPONENTS_MENDED, "\n".join(components)), whole


def start(folder: Path, stage: str, *arguments: str) -> Result:
    changes = {"MEGAKIT_CACHE_DIR": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    return run_python(f"model_{stage}.py", *arguments, cwd=folder, OMP_NUM_THREADS="1", **changes)


def run(folder: Path, stage: str, *arguments: str) -> dict[str, Any]:
    """What a script tells at its end."""
    output = start(folder, stage, *arguments).output()
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    return told


@pytest.mark.parametrize("whose", ["our components", "its components"])
def test_published_scripts_run(whose: str, mnist_dir: Path, tmp_path: Path) -> None:
    components, scripts = published()
    if whose == "its components":  # else Python finds ours
        scripts["components"] = components
    for name, code in scripts.items():
        (tmp_path / f"model_{name}.py").write_text(code)
    (tmp_path / "cache" / "MNISTCustom").mkdir(parents=True)
    (tmp_path / "cache" / "MNISTCustom" / "raw").symlink_to(mnist_dir / "MNIST" / "raw")

    pretrained = run(tmp_path, "pretrain")
    finetuned = run(tmp_path, "finetune", pretrained["checkpoint"])
    predicted = run(tmp_path, "predict", finetuned["checkpoint"])

    for told in (pretrained, finetuned):
        assert len(told["losses"]) == STEPS
        assert told["before"] != told["after"]
    # Each stage begins with the trunk that the one before ended with, and predicting keeps it.
    assert finetuned["before"] == pretrained["after"]
    assert predicted["after"] == finetuned["after"]
    assert [len(row) for row in predicted["logits"]] == [10] * 10_000
    if whose == "our components":
        assert predicted["idx"] == list(range(10_000))
        # The published module has no `validation_step`, so NeMo never validates it.
        assert all("val_loss" in logged for logged in pretrained["validations"])
        assert len(pretrained["validations"]) >= STEPS // INTERVAL
        # Started again: NeMo saved its last checkpoint without the optimizer, and Megatron says so.
        again = start(tmp_path, "pretrain")
        assert (again.status, "optimizer.state" in again.err) == (1, True), again.err
