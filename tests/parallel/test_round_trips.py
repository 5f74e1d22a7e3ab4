"""Checkpoints made under one layout and used under another, by the scripts as processes."""

from pathlib import Path

import numpy as np
import pytest

from tests.scripts import REPOSITORY, accuracy, read_csv, run_script

pytestmark = pytest.mark.long

LAYOUTS = {
    "one": ("--devices", 1),
    "dp2": ("--devices", 2),
    "tp2": ("--devices", 2, "--tensor-parallel", 2),
    "pp2": ("--devices", 2, "--pipeline-parallel", 2),
    "tp2-pp2": ("--devices", 4, "--tensor-parallel", 2, "--pipeline-parallel", 2),
}
DIGITS = ("--dataset", "digits", "--accelerator", "cpu", "--precision", "32")
HOOK = REPOSITORY / "tests" / "faults" / "hook"
SHORT = (
    *(*DIGITS, "--max-steps", 60, "--global-batch-size", 64),
    *("--save-interval", 20, "--val-interval", 20),
)


def run(script, *arguments):
    result = run_script(script, *arguments)
    assert result.status == 0, result.err
    return Path(result.out.strip())


def probabilities(path):
    return np.array([[float(row[f"p{k}"]) for k in range(10)] for row in read_csv(path)])


def metrics(runs, stage):
    rows = read_csv(runs / stage / "metrics.csv")
    return {row["step"]: float(row["train_loss"]) for row in rows}


#: Where the scripts of both models are, and what is changed for a comparison: at the default
#: learning rates, a rounding difference grows by orders of magnitude in some ten steps.
FIRST, VIT = "", "examples/vit/"
CHANGED = {FIRST: ("--lr", 1e-3), VIT: ("--lr", 1e-4)}


@pytest.fixture(scope="module")
def chain(tmp_path_factory, model):
    """The short chain in one process."""
    runs = tmp_path_factory.mktemp("one")
    arguments = (*SHORT, *CHANGED[model], "--output-dir", runs)
    run(f"{model}model_pretrain.py", *arguments)
    run(f"{model}model_finetune.py", *arguments)
    run(f"{model}model_predict.py", *DIGITS, "--output-dir", runs)
    return runs


@pytest.mark.parametrize(
    ("model", "first", "second", "third", "fourth"),
    [
        (FIRST, "pp2", "tp2", "one", "tp2-pp2"),
        (VIT, "tp2", "pp2", "dp2", "tp2-pp2"),
    ],
    scope="module",
)
def test_each_step_under_another_layout(tmp_path, chain, model, first, second, third, fourth):
    """Stopped in its middle, fine-tuning resumes under the fourth; the result is one process's."""
    arguments = (*SHORT, *CHANGED[model], "--output-dir", tmp_path)
    run(f"{model}model_pretrain.py", *arguments, *LAYOUTS[first])
    assert metrics(tmp_path, "pretrain") == pytest.approx(metrics(chain, "pretrain"), rel=1e-5)
    stopped = run_script(
        f"{model}model_finetune.py",
        *(*arguments, *LAYOUTS[second]),
        PYTHONPATH=str(HOOK),
        FAULT="megakit.checkpoints.writer:CheckpointWriter.save:2 SIGTERM 0",
    )
    assert stopped.status == 143, stopped.err
    assert not (tmp_path / "finetune" / "summary.json").exists()
    run(f"{model}model_finetune.py", *arguments, *LAYOUTS[fourth])
    assert metrics(tmp_path, "finetune") == pytest.approx(metrics(chain, "finetune"), rel=1e-4)
    path = run(f"{model}model_predict.py", *DIGITS, "--output-dir", tmp_path, *LAYOUTS[third])
    expected = probabilities(chain / "predict" / "predictions.csv")
    assert np.abs(probabilities(path) - expected).max() < 1e-3


def test_whole_trainings_on_mnist_are_as_good(tmp_path, mnist_dir):
    """At their defaults, in bf16: half a percentage point of one process's accuracy at most."""
    accuracies = []
    for layout in ("one", "tp2"):
        runs = tmp_path / layout
        common = ("--data-dir", mnist_dir, "--output-dir", runs, *LAYOUTS[layout])
        run("mnist/tutorial.py", *common, "--accelerator", "cpu")
        accuracies.append(accuracy(runs / "predict" / "predictions.csv"))
    assert abs(accuracies[1] - accuracies[0]) <= 0.005, accuracies
