"""Killed anywhere, a run goes on from its newest complete checkpoint; it ends the same."""

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


@pytest.mark.long
@pytest.mark.parametrize("place", sorted(PLACES.keys() - {AFTER_THE_LAST_SAVE}))
def test_killed_half_way(tmp_path: Path, never_stopped: dict[str, Any], place: str) -> None:
    training = Training(tmp_path)
    kill(training, Fault(place, PLACES[place] // 2))
    finish(training)
    assert training.result() == never_stopped


@pytest.mark.long
def test_killed_after_the_last_save(tmp_path: Path, never_stopped: dict[str, Any]) -> None:
    training = Training(tmp_path)
    kill(training, Fault(AFTER_THE_LAST_SAVE))
    assert not (training.path / "summary.json").exists()
    finish(training)
    assert training.result() == never_stopped
    summary = read_json(training.path / "summary.json")
    assert summary["steps"] == 40
    assert summary["checkpoint"] == summary["last_checkpoint"]
    assert Path(summary["checkpoint"]).name == never_stopped["best"]


@pytest.mark.long
def test_torchruns_agent_is_killed(tmp_path: Path) -> None:
    training = Training(tmp_path)
    starter = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = training.process(None, "--max-steps", 100_000, starter=starter)
    while not list_checkpoints(training.checkpoints):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    began = time.monotonic()
    process.communicate(timeout=60)
    assert training.left_behind() == []
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_killed_rank_ends_the_job(tmp_path: Path, rank: int) -> None:
    training = Training(tmp_path, options=("--devices", 2))
    process = training.process(Fault(BEFORE_STEP, 5, rank=rank))
    while not (training.path / "metrics.csv").exists():
        assert process.poll() is None
        time.sleep(0.05)
    began = time.monotonic()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"Rank {rank} (process " in err
    assert "was killed by SIGKILL" in err
    assert time.monotonic() - began < 30
    assert training.left_behind() == []


@pytest.mark.long
def test_the_launching_process_is_killed(tmp_path: Path) -> None:
    training = Training(tmp_path, options=("--devices", 2))
    process = training.process()
    while not (training.path / "metrics.csv").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    began = time.monotonic()
    process.communicate(timeout=60)
    assert training.left_behind() == []
    assert time.monotonic() - began < 30
    finish(training)
