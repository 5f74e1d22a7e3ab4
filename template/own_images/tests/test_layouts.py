"""Tests that two processes compute the loss of one process, with every kind of parallelism."""

from pathlib import Path

import pytest

from tests.scripts import read_csv, run_script

# In float32, because bfloat16's rounding would hide errors. On the CPU, which every machine has.
OPTIONS = (
    *("--max-steps", 5, "--global-batch-size", 32, "--limit-val-batches", 2),
    *("--precision", "32", "--accelerator", "cpu"),
)
LAYOUTS = {
    "tensor": ("--devices", 2, "--tensor-parallel", 2),
    "pipeline": ("--devices", 2, "--pipeline-parallel", 2),
    "data": ("--devices", 2),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the sample's images; returns their folder."""
    folder = tmp_path_factory.mktemp("images")
    run_script("make_sample.py", folder).output()
    return folder


def validation_loss(images: Path, folder: Path, *layout: object) -> float:
    """Returns the validation loss after a few steps of training."""
    done = run_script(
        "model_train.py", *OPTIONS, "--data-dir", images, *layout, "--output-dir", folder
    )
    assert done.status == 0, done.err
    return float(read_csv(folder / "train" / "metrics.csv")[-1]["val_loss"])


@pytest.fixture(scope="module")
def alone(images: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Returns the validation loss of one process."""
    return validation_loss(images, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_one_process(images: Path, layout: str, alone: float, tmp_path: Path) -> None:
    assert validation_loss(images, tmp_path, *LAYOUTS[layout]) == pytest.approx(alone, rel=1e-5)
