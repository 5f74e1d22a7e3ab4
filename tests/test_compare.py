"""Layouts of the scripts differ by rounding, and planted bugs are found; all runs are real."""

import re
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import REPOSITORY, Result, run

pytestmark = pytest.mark.long

TP2, PP2, DP2 = (
    ("--devices", "2", *more)
    for more in (("--tensor-parallel", "2"), ("--pipeline-parallel", "2"), ())
)

RANK = "parallel_state.get_{}_rank()"
TENSOR, DATA = RANK.format("tensor_model_parallel"), RANK.format("data_parallel")
MSE = "return self.report(nn.functional.mse_loss, x_hat, x, batch)"
#: A bug: the stage, the layout, what is replaced in model_components.py, and what `check` says.
CHECKED = {
    "the weights of a replicated layer differ by tensor-parallel rank": (
        "finetune",
        "TP2",
        'config.seed, "digit_classifier"',
        f'config.seed + {TENSOR}, "digit_classifier"',
        r"weights, ranks 0 and 1 have \S*digit_classifier.weight, and begin with different values",
    ),
    "each tensor-parallel rank drops other pixels": (
        "pretrain",
        "TP2",
        "self.corruption, self.seed)",
        f"self.corruption, self.seed + {TENSOR})",
        "samples, ranks 0, 1 of one replica read different ones",
    ),
    "each data-parallel rank shuffles on its own": (
        "pretrain",
        "DP2",
        "        if self.num_labels is not None:",
        f"        self.seed += {DATA}\n        if self.num_labels is not None:",
        r"samples, (\d of the 8 samples of one process are not read|ranks 0 and 1, of different)",
    ),
    "gradients are not synchronized": (
        "pretrain",
        "DP2",
        "        return self(batch, batch_idx)\n",
        "        self.config.finalize_model_grads_func = lambda *_, **__: None\n"
        "        return self(batch, batch_idx)\n",
        "gradients, all: each data-parallel rank has its own, and nobody averages it",
    ),
}
#: Bugs of what is logged, and one that all layouts share: what differs between two runs.
COMPARED = {
    "the logged loss is not averaged over data-parallel ranks": (
        'self.reduce = lambda reports: reports[0]["avg"]\n        ' + MSE,
        "training loss",
    ),
    "gradients are summed over data-parallel ranks instead of averaged": (
        MSE.replace("return", "loss, report =") + "\n        return 2 * loss, report",
        "gradient norm",
    ),
    "the validation counts padding": (
        f'batch.get("loss_mask", torch.ones(1)).fill_(1)\n        {MSE}',
        "validation loss",
    ),
}


def train(
    folder: Path, stage: str, *options: str, scripts: Path = REPOSITORY, **changes: Any
) -> Path:
    """Trains 20 steps on the digits; returns the run directory."""
    how = ("--dataset", "digits", "--max-steps", 20, "--output-dir", folder)
    start = ("--checkpoint", "none") if stage == "finetune" else ()
    script = scripts / f"model_{stage}.py"
    changes["PYTHONPATH"] = str(REPOSITORY)
    done = run(sys.executable, script, *how, *start, *options, **changes)
    assert done.status == 0, done.err
    return folder / stage


def compare(one: Path, other: Path, *options: str) -> Result:
    changes: Any = {"VENV": sys.prefix, "PYTHONPATH": str(REPOSITORY)}
    return run(REPOSITORY / "run", "compare", one, other, *options, **changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process of a stage and precision, trained once."""

    @cache
    def trained(stage, precision):
        return train(tmp_path_factory.mktemp("alone"), stage, "--precision", precision)

    return trained


@pytest.mark.parametrize(
    ("stage", "precision", "layout"),
    [
        ("pretrain", "32", PP2),
        ("finetune", "bf16-mixed", TP2),
    ],
)
def test_a_layout_differs_by_rounding(alone, tmp_path, stage, precision, layout):
    other = train(tmp_path, stage, "--precision", precision, *layout)
    done = compare(alone(stage, precision), other)
    assert done.status == 0, done.out
    assert "Verdict: rounding" in done.out or "Verdict: equal" in done.out
    assert done.err == ""


def scripts_with(folder: Path, old: str, new: str) -> None:
    for path in REPOSITORY.glob("model_*.py"):
        shutil.copy(path, folder)
    components = folder / "model_components.py"
    assert components.read_text().count(old) == 1
    components.write_text(components.read_text().replace(old, new))


@pytest.mark.parametrize("bug", COMPARED)
def test_a_planted_bug_differs(alone, tmp_path, bug):
    new, told = COMPARED[bug]
    scripts_with(tmp_path, MSE, new)
    precision = ("--precision", "32")
    other = train(tmp_path / "runs", "pretrain", *precision, *DP2, scripts=tmp_path)
    done = compare(alone("pretrain", "32"), other)
    assert done.status == 1, done.out
    assert "Verdict: a bug" in done.out
    step = 20 if told == "validation loss" else 1
    assert f"from step {step} on: the {told} differs" in done.out


@pytest.mark.parametrize("bug", CHECKED)
def test_a_planted_bug_is_named(tmp_path, bug):
    stage, layout, old, new, told = CHECKED[bug]
    scripts_with(tmp_path, old, new)
    start = ("--checkpoint", "none") if stage == "finetune" else ()
    options = (tmp_path / f"model_{stage}.py", "--dataset", "digits", "--layouts", layout, *start)
    changes: Any = {"VENV": sys.prefix, "PYTHONPATH": str(REPOSITORY)}
    done = run(REPOSITORY / "run", "check", *options, cwd=tmp_path, **changes)
    assert done.status == 1, done.out + done.err
    assert re.search(told, done.out), done.out


def test_a_run_equals_itself(alone):
    done = compare(alone("pretrain", "32"), alone("pretrain", "32").parent)
    assert "Verdict: equal." in done.output()
