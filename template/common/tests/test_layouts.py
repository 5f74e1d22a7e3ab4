"""Tests that two ranks compute the losses of one rank, with every kind of parallelism."""

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megakit.job.launch import run_in_fork
from megakit.testing import Ranks
from tests.project import MORE_LAYOUTS, SCRIPTS, options_of
from tests.scripts import REPOSITORY, read_csv, read_json

LAYOUTS: dict[str, tuple[object, ...]] = {
    "tensor": ("--tensor-parallel", 2),
    "pipeline": ("--pipeline-parallel", 2),
    "data": (),
    **MORE_LAYOUTS,
}
TRAINING = SCRIPTS[:-1]
#: Of each training script: its options, and the values of one rank.
Alone = dict[str, tuple[tuple[object, ...], list[float]]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Yields processes that import the frameworks only once, for all tests."""
    with Ranks(2, timeout=600) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Trains with each script for five steps, from the checkpoint of the script before."""
    data, found = tmp_path_factory.mktemp("data"), Alone()
    beginning: tuple[object, ...] = ()
    for script in TRAINING:
        options = (*options_of(script, data), "--max-steps", 5, *beginning)
        values, checkpoint = train(ranks, 1, script, tmp_path_factory.mktemp("alone"), *options)
        found[script], beginning = (options, values), ("--checkpoint", checkpoint)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("script", TRAINING)
def test_as_one_process(
    ranks: Ranks, script: str, layout: str, alone: Alone, tmp_path: Path
) -> None:
    options, values = alone[script]
    found, _ = train(ranks, 2, script, tmp_path, *options, *LAYOUTS[layout])
    assert found == pytest.approx(values, rel=1e-5)


def train(
    ranks: Ranks, world_size: int, script: str, folder: Path, *options: object
) -> tuple[list[float], str]:
    """Trains with a script; returns the last validation loss, gradient norms, and the checkpoint.

    The optimizer hides a gradient that is too large by a factor; its norm shows it.
    """
    arguments = [*map(str, (*options, "--output-dir", folder))]
    ranks.run(start, script, arguments, world_size=world_size)
    (summary,) = map(read_json, folder.glob("*/summary.json"))
    rows = read_csv(next(folder.glob("*/metrics.csv")))
    norms = [float(row["grad_norm"]) for row in rows if row["grad_norm"]]
    return [summary["val_loss"]["last"], *norms], summary["checkpoint"]


def start(script: str, arguments: list[str]) -> None:
    """Runs a script on one rank, in a process of its own, because a script ends its process."""
    path = str(REPOSITORY / script)

    def work() -> None:
        sys.argv = [path, *arguments]
        runpy.run_path(path, run_name="__main__")

    if status := run_in_fork(work):
        os._exit(status)  # the error of `Ranks` then shows what the script has printed
