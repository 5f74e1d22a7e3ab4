"""Tests that two processes compute the loss of one process, with every kind of parallelism."""

from pathlib import Path

import pytest

from tests.scripts import REPOSITORY, read_csv, run_script

# In float32, because bfloat16's rounding would hide errors. On the CPU, which every machine has.
OPTIONS = (
    *("--text", REPOSITORY / "tests", "--max-steps", 5, "--global-batch-size", 8),
    *("--num-layers", 2, "--hidden-size", 32, "--block-size", 32),
    *("--precision", "32", "--accelerator", "cpu"),
)
LAYOUTS = {
    "tensor": ("--devices", 2, "--tensor-parallel", 2),
    "pipeline": ("--devices", 2, "--pipeline-parallel", 2),
    "data": ("--devices", 2),
    "sequence": ("--devices", 2, "--tensor-parallel", 2, "--sequence-parallel"),
    "optimizer": ("--devices", 2, "--distributed-optimizer"),
}


def validation_loss(folder: Path, *layout: object) -> float:
    """Returns the validation loss after a few steps of training."""
    done = run_script("model_pretrain.py", *OPTIONS, *layout, "--output-dir", folder)
    assert done.status == 0, done.err
    return float(read_csv(folder / "pretrain" / "metrics.csv")[-1]["val_loss"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Returns the validation loss of one process."""
    return validation_loss(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_one_process(layout: str, alone: float, tmp_path: Path) -> None:
    assert validation_loss(tmp_path, *LAYOUTS[layout]) == pytest.approx(alone, rel=1e-5)
