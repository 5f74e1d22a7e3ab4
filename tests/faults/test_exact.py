"""Stopped or killed, and started again, a run comes out as if it had never been stopped."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import (
    ACCUMULATED,
    BEFORE_PRUNING,
    BEFORE_STEP,
    BETWEEN_WEIGHTS_AND_CONTEXT,
    Fault,
    Start,
    Training,
)
from tests.faults.test_killed import kill
from tests.left_behind import list_checkpoints, lowest_loss, read_whole
from tests.scripts import read_csv

STATUS = {"SIGTERM": 143, "SIGUSR1": 143, "SIGINT": 130}


def stop_after(
    training: Training, step: int, name: str = "SIGTERM", done: int = 0, *options: object
) -> Start:
    """Starts a run that has done so many steps, and stops it after the given one."""
    start = training.start(Fault(BEFORE_STEP, step - done + 1, name=name), *options)
    assert start.status == STATUS[name], start.err
    assert f"Stopped after step {step}" in start.err
    assert start.out == ""
    assert (training.checkpoints / f"step={step:06}").is_dir()
    return start


def finish(training: Training, after: int, *options: object) -> Start:
    start = training.start(None, *options)
    assert start.status == 0, start.err
    assert f"Resuming from {training.checkpoints}/step={after:06}, step {after}." in start.err
    assert start.out == f"{lowest_loss(list_checkpoints(training.checkpoints))}\n"
    return start


def test_stopped_and_killed_while_it_saves(tmp_path: Path, never_stopped: dict[str, Any]) -> None:
    training = Training(tmp_path)
    stop_after(training, 7, "SIGINT")
    kill(training, Fault(BETWEEN_WEIGHTS_AND_CONTEXT))
    finish(training, after=7)
    assert training.result() == never_stopped


@pytest.mark.long
def test_stopped_by_signals_and_a_full_disk_and_killed_while_it_saves(
    tmp_path: Path, never_stopped: dict[str, Any]
) -> None:
    """One run with all of it, since each start takes seconds; it ends as the undisturbed run."""
    training = Training(tmp_path)
    stop_after(training, 7, "SIGINT")
    stopped_at_7 = read_whole(training.checkpoints / "step=000007")
    assert stopped_at_7["val_loss"] is None

    # No file may grow beyond 100 kB: what a full disk is to a save.
    full = training.start(largest_file=100_000)
    assert full.status == 1
    (line,) = [line for line in full.err.splitlines() if "cannot save" in line]
    assert f"{training.checkpoints}/step=000010" in line
    assert "could not be written" in line or "too large" in line
    assert "The last complete checkpoint is unchanged." in line
    assert [path.name for path in training.checkpoints.iterdir()] == ["step=000007"]
    assert read_whole(training.checkpoints / "step=000007") == stopped_at_7

    stop_after(training, 15, "SIGUSR1", done=7)
    names = sorted(path.name for path in training.checkpoints.iterdir())
    assert names == ["step=000015"], "the stop's own gives way to the next one"
    # Validated at step 15, but saved by a stop: it shall not count as the best.
    assert read_whole(training.checkpoints / "step=000015")["val_loss"] is None

    kill(training, Fault(BETWEEN_WEIGHTS_AND_CONTEXT))
    partial, complete = sorted(training.checkpoints.iterdir())
    assert (partial.name, complete.name) == (".step=000020", "step=000015")
    assert (partial / "weights" / ".metadata").is_file()
    assert not (partial / "context").exists()

    kill(training, Fault(BEFORE_PRUNING, 4))  # in the last save, so no later save removes it
    assert len(list_checkpoints(training.checkpoints)) > len(never_stopped["checkpoints"])
    finish(training, after=40)
    assert training.result() == never_stopped


def compare(
    folder: Path,
    script: str,
    options: Iterable[object],
    stops: tuple[int, ...],
    first_options: tuple[object, ...] = (),
) -> tuple[Training, Training]:
    """Runs a script without a stop and with some; returns both."""
    runs = []
    for name, steps in (("whole", ()), ("stopped", stops)):
        training = Training(folder / name, script, tuple(options))
        done = 0
        for step, kind in zip(steps, ("SIGTERM", "SIGINT", "SIGUSR1"), strict=False):
            stop_after(training, step, kind, done)
            done = step
        last = finish(training, done) if done else training.start()
        assert last.status == 0, last.err
        runs.append(training)
    whole, stopped = runs
    assert stopped.result() == whole.result()
    return whole, stopped


@pytest.mark.long
@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
@pytest.mark.parametrize("model", ["", "examples/vit/"])
def test_pretraining_and_finetuning(tmp_path: Path, precision: str, model: str) -> None:
    options = (*ACCUMULATED, "--precision", precision)
    # After a save, after a validation, after both, and after the last step but one.
    pretrain, _ = compare(tmp_path, f"{model}model_pretrain.py", options, (10, 15, 30))
    start = ("--checkpoint", lowest_loss(list_checkpoints(pretrain.checkpoints)))
    compare(tmp_path / "next", f"{model}model_finetune.py", (*options, *start), (5, 20, 39))


@pytest.mark.long
def test_few_labels_and_no_accumulation(tmp_path: Path) -> None:
    options = ("--checkpoint", "none", "--num-labels", 100)
    compare(tmp_path, "model_finetune.py", options, (3, 15, 26))


@pytest.mark.long
def test_two_processes(tmp_path: Path) -> None:
    options = ("--devices", 2, "--micro-batch-size", 64)
    whole = Training(tmp_path / "whole", options=options)
    assert whole.start().status == 0
    stopped = Training(tmp_path / "stopped", options=options)
    # Ranks stop together, at a step that they agree on: the signal comes to one of them.
    for rank in (1, 0):
        start = stopped.start(Fault(BEFORE_STEP, 9, name="SIGTERM", rank=rank))
        assert start.status == 143, start.err
    assert stopped.start().status == 0
    assert stopped.result() == whole.result()


@pytest.mark.long
def test_one_process_then_two_then_one(tmp_path: Path, never_stopped: dict[str, Any]) -> None:
    """The same samples in each global batch; sums of other parts differ in rounding."""
    training = Training(tmp_path)
    stop_after(training, 12)
    start = training.start(Fault(BEFORE_STEP, 9, name="SIGTERM"), "--devices", 2)
    assert start.status == 143, start.err
    assert "2 processes: tensor 1 x pipeline 1 x data 2" in start.err
    assert training.start().status == 0
    result = training.result()
    assert result["checkpoints"].keys() == never_stopped["checkpoints"].keys()
    rows = read_csv(training.path / "metrics.csv")
    expected = never_stopped["metrics.csv"].splitlines()
    assert len(rows) == len(expected) - 1
    for row, line in zip(rows, expected[1:], strict=True):
        for text, number in zip(row.values(), line.split(","), strict=True):
            assert (text == "") == (number == "")
            if text:
                assert float(text) == pytest.approx(float(number), rel=2e-3)


def test_harness_sees_differences(never_stopped: dict[str, Any]) -> None:
    """What is compared is there: weights, optimizer, losses, curves without a gap."""
    (name,) = never_stopped["checkpoints"]
    assert name == never_stopped["best"] == "step=000040"
    assert {"__0_0.distcp", "__0_1.distcp", "val_loss"} == never_stopped["checkpoints"][name].keys()
    steps = [1, 10, 15, 20, 30, 40]
    lines = never_stopped["metrics.csv"].splitlines()[1:]
    assert [int(line.split(",")[0]) for line in lines] == steps
    curves = never_stopped["curves"]
    for name in ("loss", "lr", "grad_norm", "samples_per_second"):
        assert [step for step, _ in curves[f"train/pretrain/{name}"]] == steps
    for name in ("pretrain/loss", "pretrain_pictures/reconstructions"):
        assert [step for step, _ in curves[f"validation/{name}"]] == [15, 30, 40]
