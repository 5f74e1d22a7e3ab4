"""Tests that a run that was stopped ends as if it had not been stopped."""

from pathlib import Path

from tests.scripts import REPOSITORY, read_csv, run_script, stop_and_resume

OPTIONS = (
    *("--text", REPOSITORY / "tests", "--max-steps", 100, "--global-batch-size", 8),
    *("--num-layers", 2, "--hidden-size", 32, "--block-size", 32, "--dropout", 0.1),
    *("--precision", "32", "--accelerator", "cpu"),
)


def test_a_stopped_run_resumes_exactly(tmp_path: Path) -> None:
    run_script("model_pretrain.py", *OPTIONS, "--output-dir", tmp_path / "whole").output()
    stopped = tmp_path / "stopped"
    stop_and_resume(stopped / "pretrain", "model_pretrain.py", *OPTIONS, "--output-dir", stopped)
    whole, resumed = (
        read_csv(folder / "pretrain" / "metrics.csv") for folder in (tmp_path / "whole", stopped)
    )
    logged = {row["step"]: row["train_loss"] for row in whole}
    assert {row["step"]: row["train_loss"] for row in resumed}.items() <= logged.items()
    assert resumed[-1]["val_loss"] == whole[-1]["val_loss"]
