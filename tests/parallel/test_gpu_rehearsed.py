"""Tests for GPUs on two rehearsed ones; tests of single jobs there are in test_gpu_jobs.py."""

from pathlib import Path

import pytest

from tests.scripts import (
    REPOSITORY,
    read_csv,
    read_json,
    rehearsed,
    run_python,
    run_script,
)

pytestmark = pytest.mark.long


def test_the_tests_of_gpus(tmp_path: Path) -> None:
    """None of them is skipped."""
    tests = ("tests/gpu", "-m", "gpu", "--basetemp", tmp_path / "tests")
    options = ("-p", "no:cacheprovider", "-q", "-rs")
    done = run_python(
        "-P", "-m", "pytest", *options, *tests, cwd=REPOSITORY, timeout=1100, **rehearsed(2)
    )
    assert done.status == 0, done.out[-5000:]
    assert "skipped" not in done.out


def waits(script: str, folder: Path, *options: object) -> int:
    """How often the host waits for a GPU in a start of a script."""
    report = folder / f"report-{script}"
    given = ("--dataset", "digits", "--accelerator", "gpu", "--output-dir", folder, *options)
    run_script(script, *given, **rehearsed(1, report)).output()
    (found,) = map(read_json, report.iterdir())
    return int(found["synchronizations"])


def test_the_waits_of_validation_and_prediction(tmp_path: Path) -> None:
    """A validation does not wait in each micro batch, and a prediction waits once in a batch."""
    found = []
    for micro in (8, 64):
        folder, size = tmp_path / str(micro), ("--micro-batch-size", micro)
        training = ("--checkpoint", "none", "--global-batch-size", 64, "--max-steps", 2, *size)
        finetune = waits("model_finetune.py", folder, *training)
        found.append((finetune, waits("model_predict.py", folder, *size)))
    finetune, predict = (few - many for few, many in zip(*found, strict=True))
    num_samples = len(read_csv(folder / "predict" / "predictions.csv"))
    # The two arguments of the accuracy, for each micro batch of the padded last batch; and the two
    # checks of the mask and the loss, for each micro batch of the first step.
    assert 0 <= finetune <= 2 * 64 // 8 + 2 * (64 // 8 - 1)
    assert predict == -(-num_samples // 8) - -(-num_samples // 64)
