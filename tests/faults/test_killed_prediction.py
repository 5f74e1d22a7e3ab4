"""A killed prediction leaves the old predictions.csv; the next one removes what the kill left."""

import shutil
from pathlib import Path

import pytest

from tests.faults.harness import HOOK
from tests.left_behind import LOCK
from tests.scripts import Result, run_script

OUTPUTS = ".outputs.partial"
CSV = ".predictions.csv.partial"
OLD = "of an earlier prediction"
#: Where a prediction is killed, and what the kill leaves in the run directory.
PLACES = {
    "megakit.training.prediction:_as_rows": set(),
    "megakit.training.prediction:gather_from_ranks": {OUTPUTS},
    "megakit.reporting.results:Results.add": {OUTPUTS, CSV},
    "megakit.reporting.files:os.fsync": {OUTPUTS, CSV},
    "megakit.job.finish:remove_partial": set(),
}
WRITING, MERGING = list(PLACES)[1:3]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a classifier's run and of its predictions."""
    runs = tmp_path_factory.mktemp("predicted")
    training = ("--dataset", "digits", "--checkpoint", "none", "--max-steps", 20)
    run_script("model_finetune.py", *training, "--output-dir", runs).output()
    predict(runs).output()
    return runs


@pytest.fixture
def runs(predicted: Path, tmp_path: Path) -> Path:
    """A copy, in which predictions.csv has another content."""
    copy = Path(shutil.copytree(predicted, tmp_path / "runs"))
    (copy / "predict" / "predictions.csv").write_text(OLD)
    return copy


def predict(runs: Path, *options: object, fault: str | None = None) -> Result:
    changes = {"FAULT": fault, "PYTHONPATH": str(HOOK)} if fault else {}
    return run_script("model_predict.py", "--output-dir", runs, *options, **changes)


def leftovers(runs: Path) -> set[str]:
    """The hidden files of the run directory, except for the lock."""
    return {path.name for path in (runs / "predict").glob(".*")} - {LOCK}


@pytest.mark.parametrize("place", PLACES)
def test_killed(predicted: Path, runs: Path, place: str) -> None:
    killed = predict(runs, fault=f"{place}:1 SIGKILL 0")
    assert killed.status == -9, killed.err
    assert (runs / "predict" / "predictions.csv").read_text() == OLD
    assert leftovers(runs) == PLACES[place]
    assert predict(runs).status == 0
    same = [folder / "predict" / "predictions.csv" for folder in (runs, predicted)]
    assert same[0].read_bytes() == same[1].read_bytes()
    assert leftovers(runs) == set()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(predicted: Path, runs: Path, rank: int) -> None:
    killed = predict(runs, "--devices", 2, fault=f"{WRITING}:1 SIGKILL {rank}")
    assert killed.status == 1, killed.err
    assert (runs / "predict" / "predictions.csv").read_text() == OLD
    predict(runs, "--devices", 2).output()
    same = [folder / "predict" / "predictions.csv" for folder in (runs, predicted)]
    assert same[0].read_bytes() == same[1].read_bytes()
    assert leftovers(runs) == set()


def test_an_error_leaves_no_incomplete_files(runs: Path) -> None:
    failed = predict(runs, fault=f"{MERGING}:1 OSError 0")
    assert failed.status == 1
    assert "made to fail here" in failed.err
    assert (runs / "predict" / "predictions.csv").read_text() == OLD
    assert leftovers(runs) == set()
