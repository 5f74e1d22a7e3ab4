"""Killed anywhere, a run or a prediction goes on from what was complete; it ends the same."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import (
    AFTER_THE_LAST_SAVE,
    BEFORE_STEP,
    BETWEEN_WEIGHTS_AND_MANIFEST,
    HOOK,
    MEGATRON,
    PLACES,
    Fault,
    Training,
    leftover_processes,
)
from tests.left_behind import LOCK, list_checkpoints, read_whole
from tests.once import Chain
from tests.scripts import read_json, run_script

pytestmark = pytest.mark.long


def kill(training: Training, fault: Fault) -> None:
    """Starts a run and kills it; what was complete stays so."""
    before = list_checkpoints(training.checkpoints)
    start = training.start(fault)
    assert start.status == -9, start.err
    after = list_checkpoints(training.checkpoints)
    assert after or not before, f"no complete checkpoint left after {fault}"
    for checkpoint in after:
        read_whole(checkpoint)


def test_killed_at_every_place(tmp_path: Path, script: str, never_stopped: dict[str, Any]) -> None:
    """One run, since each start takes seconds; no kill but the last lets it come to its end."""
    training = Training(tmp_path, script)
    for place in sorted(PLACES, key=lambda place: (place == AFTER_THE_LAST_SAVE, place)):
        kill(training, Fault(place, PLACES[place]))
    assert not (training.path / "summary.json").exists()
    newest = list_checkpoints(training.checkpoints)[-1]
    start = training.start()
    assert start.status == 0, start.err
    assert f"Resuming from {newest}, step " in start.err
    assert training.result() == never_stopped
    summary = read_json(training.path / "summary.json")
    assert summary["steps"] == 40
    assert Path(summary["checkpoint"]).name == never_stopped["best"]


def test_one_of_two_ranks_is_killed(tmp_path: Path) -> None:
    """Without NeMo, and with the distributed optimizer: each rank has states of its own."""
    options = ("--devices", 2, "--distributed-optimizer")
    whole, training = (Training(tmp_path / name, MEGATRON, options) for name in ("whole", "parts"))
    assert whole.start().status == 0
    for place, count in ((BEFORE_STEP, 13), (BETWEEN_WEIGHTS_AND_MANIFEST, 1)):
        killed = training.start(Fault(place, count, rank=1))
        assert killed.status == 1, killed.err
        assert [path.name for path in list_checkpoints(training.checkpoints)] == ["step=000010"]
    assert "Resuming from" in training.start().err
    assert training.result() == whole.result()


def test_the_launching_process_is_killed(tmp_path: Path) -> None:
    training = Training(tmp_path, options=("--devices", 2))
    process = training.process(None, "--max-steps", 100_000)
    training.wait_for_steps(process)
    process.kill()
    process.communicate(timeout=60)
    assert leftover_processes(training.mark) == []


def test_killed_predictions(chain: Chain, tmp_path: Path) -> None:
    """The old predictions.csv stays; the next prediction removes what the kill left."""
    runs = Path(shutil.copytree(chain.runs, tmp_path / "runs"))
    csv = runs / "predict" / "predictions.csv"
    csv.write_text("of an earlier prediction")
    outputs, partial = ".outputs.partial", ".predictions.csv.partial"
    for moment, status, left in (
        ("megakit.training.outputs:gather_from_ranks:1 SIGKILL 0", -9, {outputs}),
        ("megakit.training.predictions_csv:csv.writer:1 SIGKILL 0", -9, {outputs, partial}),
        ("megakit.training.predictions_csv:csv.writer:1 OSError 0", 1, set()),
        (None, 0, set()),
    ):
        changes = {"FAULT": moment, "PYTHONPATH": str(HOOK)} if moment else {}
        ended = run_script("model_predict.py", "--output-dir", runs, **changes)
        assert ended.status == status, ended.err
        assert (csv.read_text() == "of an earlier prediction") == (moment is not None)
        assert {path.name for path in csv.parent.glob(".*")} - {LOCK} == left
    assert csv.read_bytes() == (chain.runs / "predict" / "predictions.csv").read_bytes()
