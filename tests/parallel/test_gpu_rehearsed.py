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

SHORT = ("--dataset", "digits", "--max-steps", 50, "--global-batch-size", 64)


def test_the_tests_of_gpus(tmp_path: Path) -> None:
    """None of them is skipped."""
    tests = ("tests/gpu", "-m", "gpu", "--basetemp", tmp_path / "tests")
    options = ("-p", "no:cacheprovider", "-q", "-rs")
    done = run_python(
        "-P", "-m", "pytest", *options, *tests, cwd=REPOSITORY, timeout=1100, **rehearsed(2)
    )
    assert done.status == 0, done.out[-5000:]
    assert "skipped" not in done.out


def train(folder: Path, *layout: object) -> list[float]:
    """The losses of a pretraining on GPUs."""
    options = (*SHORT, "--accelerator", "gpu", "--precision", 32, "--output-dir", folder)
    changes = rehearsed(2, folder / "report")
    run_script("model_pretrain.py", *options, *layout, **changes).output()
    return [float(row["train_loss"]) for row in read_csv(folder / "pretrain" / "metrics.csv")]


def test_two_gpus_train_as_one(tmp_path: Path) -> None:
    """Each process opens its own GPU alone; tests/gpu has the other layouts."""
    losses = train(tmp_path / "two", "--devices", 2)
    assert losses == pytest.approx(train(tmp_path / "one"), rel=1e-5)
    reports = [*map(read_json, (tmp_path / "two" / "report").iterdir())]
    assert sorted((report["rank"], report["opened"]) for report in reports) == [(0, [0]), (1, [1])]


def waits(script: str, folder: Path, *options: object) -> int:
    """How often the host waits for a GPU in a start of a script."""
    report = folder / f"report-{script}"
    given = ("--dataset", "digits", "--accelerator", "gpu", "--output-dir", folder, *options)
    run_script(script, *given, **rehearsed(1, report)).output()
    (found,) = map(read_json, report.iterdir())
    return int(found["synchronizations"])


def test_the_waits_of_validation_and_prediction(tmp_path: Path) -> None:
    """A validation does not wait in each micro batch, and a prediction waits once in a batch."""
    found = {}
    for micro in (8, 64):
        folder, size = tmp_path / str(micro), ("--micro-batch-size", micro)
        training = ("--global-batch-size", 64, "--max-steps", 2, *size)
        found[micro] = (
            waits("model_pretrain.py", folder, *training),
            waits("model_finetune.py", folder, *training),
            waits("model_predict.py", folder, *size),
        )
    pretrain, finetune, predict = (few - many for few, many in zip(*found.values(), strict=True))
    num_samples = len(read_csv(folder / "predict" / "predictions.csv"))
    assert pretrain == 0
    # The two arguments of the accuracy, for each micro batch of the padded last batch.
    assert 0 <= finetune <= 2 * 64 // 8
    assert predict == -(-num_samples // 8) - -(-num_samples // 64)
