"""Tests that two processes compute the loss of one process, with every kind of parallelism."""

from pathlib import Path

import pytest

from tests.project import MORE_LAYOUTS, SCRIPTS, options_of
from tests.scripts import read_csv, run_script

LAYOUTS = {
    "tensor": ("--devices", 2, "--tensor-parallel", 2),
    "pipeline": ("--devices", 2, "--pipeline-parallel", 2),
    "data": ("--devices", 2),
    **MORE_LAYOUTS,
}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Returns the options of five steps of the first script."""
    return *options_of(SCRIPTS[0], tmp_path_factory.mktemp("data")), "--max-steps", 5


@pytest.fixture(scope="module")
def alone(options: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> float:
    """Returns the validation loss of one process."""
    return validation_loss(tmp_path_factory.mktemp("alone"), *options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_one_process(
    layout: str, options: tuple[object, ...], alone: float, tmp_path: Path
) -> None:
    found = validation_loss(tmp_path, *options, *LAYOUTS[layout])
    assert found == pytest.approx(alone, rel=1e-5)


def validation_loss(folder: Path, *options: object) -> float:
    """Trains with the first script; returns the last validation loss."""
    run_script(SCRIPTS[0], *options, "--output-dir", folder).output()
    (metrics,) = folder.glob("*/metrics.csv")
    return float(read_csv(metrics)[-1]["val_loss"])
