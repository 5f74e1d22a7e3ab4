"""Killed anywhere, a run goes on from its newest complete checkpoint; it ends the same."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import (
    AFTER_THE_LAST_SAVE,
    BEFORE_STEP,
    PLACES,
    Fault,
    Training,
)
from tests.left_behind import list_checkpoints, read_whole
from tests.scripts import read_json

pytestmark = pytest.mark.long


def finish(training: Training) -> None:
    """Starts a run once more, after which it has to be done, from where it was."""
    complete = list_checkpoints(training.checkpoints)
    start = training.start()
    assert start.status == 0, start.err
    if complete:
        assert f"Resuming from {complete[-1]}, step " in start.err


def kill(training: Training, fault: Fault) -> None:
    """Starts a run and kills it; what was complete stays so."""
    before = list_checkpoints(training.checkpoints)
    start = training.start(fault)
    assert start.status == -9, start.err
    after = list_checkpoints(training.checkpoints)
    assert after or not before, f"no complete checkpoint left after {fault}"
    for checkpoint in after:
        read_whole(checkpoint)


def test_killed_at_every_place(tmp_path: Path, never_stopped: dict[str, Any]) -> None:
    """One run, since each start takes seconds; no kill at a place lets it come to its end."""
    training = Training(tmp_path)
    for place in sorted(PLACES.keys() - {AFTER_THE_LAST_SAVE}):
        kill(training, Fault(place, 2 if place == BEFORE_STEP else 1))
    kill(training, Fault(AFTER_THE_LAST_SAVE))
    assert not (training.path / "summary.json").exists()
    finish(training)
    assert training.result() == never_stopped
    summary = read_json(training.path / "summary.json")
    assert summary["steps"] == 40
    assert summary["checkpoint"] == summary["last_checkpoint"]
    assert Path(summary["checkpoint"]).name == never_stopped["best"]


def wait_for_steps(training: Training, process: Any) -> float:
    """Waits until a job has written metrics; returns the time."""
    while not (training.path / "metrics.csv").exists():
        assert process.poll() is None
        time.sleep(0.05)
    return time.monotonic()


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    training = Training(tmp_path, options=("--devices", 2))
    process = training.process(Fault(BEFORE_STEP, 5, rank=1))
    began = wait_for_steps(training, process)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Rank 1 (process " in err
    assert "was killed by SIGKILL" in err
    assert time.monotonic() - began < 30
    assert training.left_behind() == []


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("options", "starter"), [(("--devices", 2), ()), ((), TORCHRUN)], ids=["ours", "torchrun"]
)
def test_the_launching_process_is_killed(
    tmp_path: Path, options: tuple[object, ...], starter: tuple[str, ...]
) -> None:
    training = Training(tmp_path, options=options)
    process = training.process(None, "--max-steps", 100_000, starter=starter)
    began = wait_for_steps(training, process)
    process.kill()
    process.communicate(timeout=60)
    assert training.left_behind() == []
    assert time.monotonic() - began < 30


def test_a_killed_worker_of_the_loader_is_named(tmp_path: Path) -> None:
    place = "torch.utils.data._utils.fetch:_MapDatasetFetcher.fetch"
    start = Training(tmp_path).start(Fault(place, 2), "--num-workers", 2)
    assert start.status == 1
    assert re.search(r"DataLoader worker \(pid.* is killed by signal: Killed", start.err)
    assert "model_pretrain.py failed; the log is " in start.err
