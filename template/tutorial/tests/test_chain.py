"""Tests pretraining, fine-tuning and prediction in sequence, on scikit-learn's digits."""

from pathlib import Path

import pytest

from tests.scripts import accuracy, read_csv, run_script


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the three scripts for a few steps; returns their output folder."""
    folder = tmp_path_factory.mktemp("chain")
    few = ("--max-steps", 30, "--val-interval", 10)
    for script, options in (
        ("model_pretrain.py", ("--dataset", "digits", *few)),
        ("model_finetune.py", few),
        ("model_predict.py", ()),
    ):
        done = run_script(script, *options, "--output-dir", folder)
        assert done.status == 0, done.err
    return folder


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_it_learns(runs: Path, stage: str) -> None:
    losses = [
        float(row["val_loss"]) for row in read_csv(runs / stage / "metrics.csv") if row["val_loss"]
    ]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_every_test_image_is_predicted_once_in_order(runs: Path) -> None:
    rows = read_csv(runs / "predict" / "predictions.csv")
    assert [int(row["idx"]) for row in rows] == list(range(300))


@pytest.mark.long
def test_accuracy_at_the_defaults(tmp_path: Path) -> None:
    done = run_script("mnist/tutorial.py", "--dataset", "digits", "--output-dir", tmp_path)
    assert done.status == 0, done.err
    assert accuracy(tmp_path / "predict" / "predictions.csv") >= 0.9
