"""A run with `--stop-after` that is killed and stopped ends at the same step, to the last bit."""

from pathlib import Path

import pytest

from tests.faults.harness import AFTER_THE_LAST_SAVE, BEFORE_STEP, Fault, Training
from tests.left_behind import read_whole
from tests.scripts import read_csv, read_json

pytestmark = pytest.mark.long

#: The learning rate is so high that the loss soon rises now and then.
OPTIONS = (
    *("--checkpoint", "none", "--max-steps", 200, "--lr", 0.1, "--save-interval", 20),
    *("--val-interval", 5, "--stop-after", 2, "--best-by", "val_accuracy"),
)


def make(folder: Path) -> Training:
    return Training(folder, "model_finetune.py", OPTIONS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run that stops early by itself; a mistaken command before is not in its way."""
    training = make(tmp_path_factory.mktemp("whole"))
    refused = training.start(None, "--best-by", "val_acuracy")
    assert refused.status == 2
    (line,) = [line for line in refused.err.splitlines() if "--best-by" in line]
    assert "There are val_loss, val_accuracy, last." in line
    assert (training.path / "metrics.csv").read_text().count("\n") == 1

    start = training.start()
    assert start.status == 0, start.err
    assert "It stopped early, after step" in start.err
    return training


def steps_of(training: Training) -> int:
    steps: int = read_json(training.path / "summary.json")["steps"]
    return steps


def test_it_stops_after_two_validations_without_a_better_accuracy(whole: Training) -> None:
    rows = read_csv(whole.path / "metrics.csv")
    validated = {int(row["step"]): float(row["val_accuracy"]) for row in rows if row["val_loss"]}
    *before, last = validated
    assert last == steps_of(whole) < 200
    best_step = max(validated, key=lambda step: validated[step])  # the first of equal ones
    assert best_step == before[-2]
    running = [max(list(validated.values())[: n + 1]) for n in range(len(validated))]
    since = 0
    for number in range(1, len(running) - 1):
        since = 0 if running[number] > running[number - 1] else since + 1
        assert since < 2, "it should have stopped earlier"
    best = Path(read_json(whole.path / "summary.json")["checkpoint"])
    assert read_whole(best)["values"]["val_accuracy"] == pytest.approx(validated[best_step])
    assert read_whole(best)["step"] == best_step
    # The learning rate is that of step N of 200.
    assert float(rows[-1]["lr"]) > 0.01


def test_the_same_command_says_done(whole: Training) -> None:
    start = whole.start()
    assert start.status == 0
    assert "finetune is already done" in start.err
    assert start.out == read_json(whole.path / "summary.json")["checkpoint"] + "\n"


def test_killed_and_stopped_while_it_counts(whole: Training, tmp_path: Path) -> None:
    end = steps_of(whole)
    training = make(tmp_path)
    # With one of the two validations behind it.
    stopped = training.start(Fault(BEFORE_STEP, end - 3 + 1, name="SIGTERM"))
    assert stopped.status == 143, stopped.err
    assert f"Stopped after step {end - 3}" in stopped.err
    # After the last checkpoint, before the summary.
    killed = training.start(Fault(AFTER_THE_LAST_SAVE))
    assert killed.status == -9
    assert not (training.path / "summary.json").exists()
    last = training.start()
    assert last.status == 0, last.err
    assert f"It stopped early, after step {end} of 200." in last.err
    assert training.result() == whole.result()
    theirs, ours = (read_json(run.path / "summary.json") for run in (whole, training))
    for name in ("steps", "train_loss", "val_loss", "metrics"):
        assert ours[name] == theirs[name]
