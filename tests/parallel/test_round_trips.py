"""Checkpoints made under one layout and used under another, by the scripts as processes."""

from pathlib import Path

import numpy as np
import pytest

from tests.faults.harness import HOOK
from tests.scripts import read_csv, run_script

pytestmark = pytest.mark.long

LAYOUTS = {
    "tp2": ("--devices", 2, "--tensor-parallel", 2),
    "pp2": ("--devices", 2, "--pipeline-parallel", 2),
    "tp2-pp2": ("--devices", 4, "--tensor-parallel", 2, "--pipeline-parallel", 2),
}
DIGITS = ("--dataset", "digits", "--accelerator", "cpu", "--precision", "32")
#: At the default learning rates, a rounding difference grows by orders of magnitude in some ten
#: steps.
SHORT = (
    *(*DIGITS, "--max-steps", 60, "--global-batch-size", 64),
    *("--save-interval", 20, "--val-interval", 20, "--lr", 1e-3),
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


def test_each_step_under_another_layout(tmp_path):
    """Stopped in its middle, fine-tuning resumes under another one; the result is one process's."""
    one, several = (tmp_path / name for name in ("one", "several"))
    for script in ("model_pretrain.py", "model_finetune.py"):
        run(script, *SHORT, "--output-dir", one)
    expected = run("model_predict.py", *DIGITS, "--output-dir", one)

    arguments = (*SHORT, "--output-dir", several)
    run("model_pretrain.py", *arguments, *LAYOUTS["pp2"])
    assert metrics(several, "pretrain") == pytest.approx(metrics(one, "pretrain"), rel=1e-5)
    stopped = run_script(
        *("model_finetune.py", *arguments, *LAYOUTS["tp2"]),
        PYTHONPATH=str(HOOK),
        FAULT="megakit.checkpoints.writer:CheckpointWriter.save:2 SIGTERM 0",
    )
    assert stopped.status == 143, stopped.err
    assert not (several / "finetune" / "summary.json").exists()
    run("model_finetune.py", *arguments, *LAYOUTS["tp2-pp2"])
    assert metrics(several, "finetune") == pytest.approx(metrics(one, "finetune"), rel=1e-4)
    path = run("model_predict.py", *DIGITS, "--output-dir", several, "--devices", 2)
    assert np.abs(probabilities(path) - probabilities(expected)).max() < 1e-3
