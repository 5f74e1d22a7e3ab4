"""Tests pretraining, fine-tuning and prediction in sequence, on scikit-learn's digits."""

from pathlib import Path

import pytest

from tests.scripts import read_csv, run_script, stop_and_resume

DIGITS = ("--dataset", "digits", "--accelerator", "cpu", "--precision", "32")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the three scripts for a few steps; returns their output folder."""
    folder = tmp_path_factory.mktemp("chain")
    few = ("--max-steps", 30, "--val-interval", 10, "--global-batch-size", 64)
    for script, options in (
        ("model_pretrain.py", few),
        ("model_finetune.py", few),
        ("model_predict.py", ()),
    ):
        run_script(script, *DIGITS, *options, "--output-dir", folder).output()
    return folder


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_it_learns(runs: Path, stage: str) -> None:
    rows = read_csv(runs / stage / "metrics.csv")
    losses = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_every_test_image_is_predicted_once_in_order(runs: Path) -> None:
    rows = read_csv(runs / "predict" / "predictions.csv")
    assert [int(row["idx"]) for row in rows] == list(range(300))


def test_a_stopped_run_resumes_exactly(tmp_path: Path) -> None:
    options = (*DIGITS, "--max-steps", 60, "--global-batch-size", 16)
    run_script("model_pretrain.py", *options, "--output-dir", tmp_path / "whole").output()
    stopped = tmp_path / "stopped"
    stop_and_resume(stopped / "pretrain", "model_pretrain.py", *options, "--output-dir", stopped)
    whole, resumed = (
        read_csv(folder / "pretrain" / "metrics.csv") for folder in (tmp_path / "whole", stopped)
    )
    logged = {row["step"]: row["train_loss"] for row in whole}
    assert {row["step"]: row["train_loss"] for row in resumed}.items() <= logged.items()
    assert resumed[-1]["val_loss"] == whole[-1]["val_loss"]
