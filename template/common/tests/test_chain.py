"""Tests all scripts in sequence, and that a training that was stopped resumes exactly."""

from pathlib import Path

import pytest

from tests.project import SCRIPTS, STEPS, check_results, options_of
from tests.scripts import read_csv, run_script, stop_and_resume

TRAINING = {script: 201 for script in SCRIPTS[:-1]} | {SCRIPTS[0]: STEPS}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder for data that the tests make."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs all scripts; returns their output folder."""
    folder = tmp_path_factory.mktemp("chain")
    for script in SCRIPTS:
        run_script(script, *short_options(script, data), "--output-dir", folder).output()
    return folder


def short_options(script: str, data: Path) -> tuple[object, ...]:
    """Returns the options of a short run."""
    if steps := TRAINING.get(script):
        return *options_of(script, data), "--max-steps", steps, "--val-interval", steps // 3
    return options_of(script, data)


def metrics_of(script: str, runs: Path) -> list[dict[str, str]]:
    """Returns the rows of metrics.csv of a script's run."""
    stage = script.removeprefix("model_").removesuffix(".py")
    return read_csv(runs / stage / "metrics.csv")


@pytest.mark.parametrize("script", TRAINING)
def test_it_learns(runs: Path, script: str) -> None:
    rows = metrics_of(script, runs)
    validated = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert len(validated) == 3
    assert validated[-1] < float(rows[0]["train_loss"])


def test_the_results_are_complete(runs: Path) -> None:
    check_results(runs)


def test_a_stopped_run_resumes_exactly(runs: Path, data: Path, tmp_path: Path) -> None:
    script = SCRIPTS[0]
    options = (*short_options(script, data), "--output-dir", tmp_path)
    directory = tmp_path / script.removeprefix("model_").removesuffix(".py")
    stop_and_resume(directory, script, *options)
    whole, resumed = metrics_of(script, runs), metrics_of(script, tmp_path)
    logged = {row["step"]: row["train_loss"] for row in whole}
    assert {row["step"]: row["train_loss"] for row in resumed}.items() <= logged.items()
    assert resumed[-1]["val_loss"] == whole[-1]["val_loss"]
