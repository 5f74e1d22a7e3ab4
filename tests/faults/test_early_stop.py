"""A run with `--stop-after` that is killed and stopped ends at the same step, to the last bit."""

from pathlib import Path

import pytest

from tests.faults.harness import AFTER_THE_LAST_SAVE, BEFORE_STEP, Fault, Training
from tests.left_behind import read_whole
from tests.scripts import read_csv, read_json

#: The learning rate is so high that the loss soon rises now and then.
OPTIONS = (
    *("--checkpoint", "none", "--max-steps", 200, "--lr", 0.1, "--save-interval", 20),
    *("--val-interval", 5, "--stop-after", 2, "--best-by", "val_accuracy"),
)


@pytest.mark.long
def test_killed_and_stopped_while_it_counts(tmp_path: Path, script: str) -> None:
    finetune = script.replace("pretrain", "finetune")
    whole, training = (Training(tmp_path / name, finetune, OPTIONS) for name in ("whole", "parts"))
    assert "It stopped early, after step" in whole.start().err
    theirs = read_json(whole.path / "summary.json")
    end = theirs["steps"]
    rows = [row for row in read_csv(whole.path / "metrics.csv") if row["val_loss"]]
    *before, best, second, third = (float(row["val_accuracy"]) for row in rows)
    assert max([0.0, *before]) < best >= max(second, third)
    best_step = read_whole(Path(theirs["checkpoint"]))["step"]
    assert (best_step, end) == (int(rows[-3]["step"]), int(rows[-1]["step"]))

    # With one of the two validations behind it.
    stopped = training.start(Fault(BEFORE_STEP, end - 3 + 1, name="SIGTERM"))
    assert stopped.status == 143, stopped.err
    # After the last checkpoint, before the summary.
    killed = training.start(Fault(AFTER_THE_LAST_SAVE))
    assert killed.status == -9
    last = training.start()
    assert last.status == 0, last.err
    assert f"It stopped early, after step {end} of 200." in last.err
    assert training.result() == whole.result()
    ours = read_json(training.path / "summary.json")
    for name in ("steps", "train_loss", "val_loss", "metrics"):
        assert ours[name] == theirs[name]
    assert "finetune is already done" in whole.start().err
