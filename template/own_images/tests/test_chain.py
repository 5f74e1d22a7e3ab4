"""Tests training and prediction in sequence, on the images of `make_sample.py`."""

from pathlib import Path

import pytest

from tests.scripts import read_csv, run_script, stop_and_resume

CPU = ("--accelerator", "cpu", "--precision", "32")
FEW = (*CPU, "--max-steps", 60, "--global-batch-size", 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the images, trains for some steps and predicts; returns the folder of all."""
    folder = tmp_path_factory.mktemp("chain")
    run_script("make_sample.py", folder / "images").output()
    common = ("--data-dir", folder / "images", "--output-dir", folder)
    run_script("model_train.py", *common, *FEW, "--val-interval", 20).output()
    run_script("model_predict.py", *common, *CPU).output()
    return folder


def test_it_learns(folder: Path) -> None:
    rows = read_csv(folder / "train" / "metrics.csv")
    losses = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_every_test_image_is_predicted_once_in_order(folder: Path) -> None:
    rows = read_csv(folder / "predict" / "predictions.csv")
    assert [int(row["idx"]) for row in rows] == list(range(300))


def test_a_stopped_run_resumes_exactly(folder: Path) -> None:
    stopped = folder / "stopped"
    options = ("--data-dir", folder / "images", *FEW, "--output-dir", stopped)
    stop_and_resume(stopped / "train", "model_train.py", *options)
    whole, resumed = (read_csv(runs / "train" / "metrics.csv") for runs in (folder, stopped))
    logged = {row["step"]: row["train_loss"] for row in whole}
    assert {row["step"]: row["train_loss"] for row in resumed}.items() <= logged.items()
    assert resumed[-1]["val_loss"] == whole[-1]["val_loss"]
