"""Stopped or killed, and started again, a run comes out as if it had never been stopped."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import (
    BEFORE_STEP,
    BETWEEN_WEIGHTS_AND_MANIFEST,
    MEGATRON,
    NEMO,
    Fault,
    Training,
)
from tests.faults.test_killed import kill
from tests.left_behind import list_checkpoints, lowest_loss, read_whole
from tests.scripts import read_csv, run, run_script

STATUS = {"SIGTERM": 143, "SIGUSR1": 143, "SIGINT": 130}


def stop_after(training: Training, step: int, name: str = "SIGTERM", done: int = 0) -> None:
    """Starts a run that has done so many steps, and stops it after the given one."""
    start = training.start(Fault(BEFORE_STEP, step - done + 1, name=name))
    assert start.status == STATUS[name], start.err
    assert f"Stopped after step {step}" in start.err
    assert start.out == ""
    assert (training.checkpoints / f"step={step:06}").is_dir()


def finish(training: Training, after: int) -> None:
    start = training.start()
    assert start.status == 0, start.err
    assert f"Resuming from {training.checkpoints}/step={after:06}, step {after}." in start.err
    assert start.out == f"{lowest_loss(list_checkpoints(training.checkpoints))}\n"


def test_stopped_and_killed_while_it_saves(
    tmp_path: Path, script: str, never_stopped: dict[str, Any]
) -> None:
    training = Training(tmp_path, script)
    stop_after(training, 7, "SIGINT")
    kill(training, Fault(BETWEEN_WEIGHTS_AND_MANIFEST))
    finish(training, after=7)
    assert training.result() == never_stopped


@pytest.mark.long
def test_stopped_by_signals_and_a_full_disk(
    tmp_path: Path, script: str, never_stopped: dict[str, Any]
) -> None:
    """One run with all of it, since each start takes seconds; it ends as the undisturbed run."""
    training = Training(tmp_path, script)
    stop_after(training, 7, "SIGINT")
    stopped_at_7 = read_whole(training.checkpoints / "step=000007")
    assert stopped_at_7["val_loss"] is None

    # No file may grow beyond 100 kB: what a full disk is to a save.
    full = training.start(largest_file=100_000)
    assert full.status == 1
    (line,) = [line for line in full.err.splitlines() if "cannot save" in line]
    assert f"{training.checkpoints}/step=000010" in line
    assert "Complete checkpoints are unchanged." in line
    assert [path.name for path in training.checkpoints.iterdir()] == ["step=000007"]
    assert read_whole(training.checkpoints / "step=000007") == stopped_at_7

    stop_after(training, 15, "SIGUSR1", done=7)
    names = sorted(path.name for path in training.checkpoints.iterdir())
    assert names == ["step=000015"], "the stop's own gives way to the next one"
    # Validated at step 15, but saved by a stop: it shall not count as the best.
    assert read_whole(training.checkpoints / "step=000015")["val_loss"] is None

    finish(training, after=15)
    assert training.result() == never_stopped


@pytest.mark.long
@pytest.mark.parametrize("script", ["nemo"], indirect=True)
def test_stock_steps_differ_by_rounding(tmp_path: Path, never_stopped: dict[str, Any]) -> None:
    """Without the patches that only save time: docs/your_copy.md."""
    stock = Training(tmp_path)
    run_script(NEMO, *stock.common, MEGAKIT_STOCK="1").output()
    assert_equal_but_for_rounding(stock, never_stopped, 1e-4)


@pytest.mark.long
def test_one_process_then_two_then_one(
    tmp_path: Path, script: str, never_stopped: dict[str, Any]
) -> None:
    """The same samples in each global batch; sums of other parts differ in rounding.

    Two ranks stop together, at a step that they agree on: the signal comes to one of them.
    """
    training = Training(tmp_path, script)
    stop_after(training, 12)
    start = training.start(Fault(BEFORE_STEP, 9, name="SIGTERM", rank=1), "--devices", 2)
    assert start.status == 143, start.err
    assert "2 processes: tensor 1 x pipeline 1 x data 2" in start.err
    assert training.start().status == 0
    assert_equal_but_for_rounding(training, never_stopped, 2e-3)


#: Compares all tensors of two checkpoints; a later Megatron's files also contain the times.
SAME = """
import sys, torch
from torch.distributed.checkpoint import FileSystemReader, load
found = []
for folder in sys.argv[1:]:
    reader = FileSystemReader(folder + "/weights")
    saved = reader.read_metadata().state_dict_metadata.items()
    saved = {k: t for k, t in saved if hasattr(t, "size")}
    found.append({k: torch.empty(t.size, dtype=t.properties.dtype) for k, t in saved.items()})
    load(found[-1], storage_reader=reader, no_dist=True)
one, other = found
assert one.keys() == other.keys() and any("exp_avg" in name for name in one)
assert all(torch.equal(one[name], other[name]) for name in one)
"""


@pytest.mark.long
def test_a_later_megatron_resumes(tmp_path: Path, newest_venv: Path, mnist_dir: Path) -> None:
    """Its own checkpoints bit by bit, those of the tutorial's Megatron-Core but for rounding."""
    data = ("--dataset", "mnist", "--data-dir", mnist_dir, "--precision", 32)
    options = (*data, "--devices", 2, "--distributed-optimizer")
    whole, parts, other = (
        Training(tmp_path / name, MEGATRON, options, newest_venv / "bin/python") for name in "abc"
    )
    assert whole.start().status == 0
    expected = whole.result()
    assert parts.start(Fault(BEFORE_STEP, 6, name="SIGTERM", rank=1)).status == 143
    assert parts.start(Fault(BETWEEN_WEIGHTS_AND_MANIFEST, rank=1)).status == 1
    assert "Resuming from" in parts.start().err
    assert parts.result()["metrics.csv"] == expected["metrics.csv"]
    for checkpoint in list_checkpoints(whole.checkpoints):
        run(whole.python, "-c", SAME, checkpoint, parts.checkpoints / checkpoint.name).output()

    other.python = sys.executable
    assert other.start(Fault(BEFORE_STEP, 13, rank=1)).status == 1
    other.python = whole.python
    finish(other, after=10)
    assert_equal_but_for_rounding(other, expected, 1e-5)


def assert_equal_but_for_rounding(
    training: Training, never_stopped: dict[str, Any], tolerance: float
) -> None:
    assert training.result()["checkpoints"].keys() == never_stopped["checkpoints"].keys()
    rows = read_csv(training.path / "metrics.csv")
    _, *expected = never_stopped["metrics.csv"].splitlines()
    for row, line in zip(rows, expected, strict=True):
        for text, number in zip(row.values(), line.split(","), strict=True):
            assert (text == "") == (number == "")
            if text:
                assert float(text) == pytest.approx(float(number), rel=tolerance)
