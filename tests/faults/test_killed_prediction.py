"""A killed prediction leaves the old predictions.csv; the next one removes what the kill left."""

import shutil
from pathlib import Path

import pytest

from tests.faults.harness import HOOK
from tests.left_behind import LOCK
from tests.once import Chain
from tests.scripts import Result, run_script

OLD = "of an earlier prediction"
WRITING = "megakit.training.prediction:gather_from_ranks"
MERGING = "megakit.reporting.results:Results.add"
#: What a kill leaves in the run directory.
OUTPUTS, CSV = ".outputs.partial", ".predictions.csv.partial"

pytestmark = pytest.mark.long


@pytest.fixture
def runs(chain: Chain, tmp_path: Path) -> Path:
    """A copy of the chain's runs, in which predictions.csv has another content."""
    copy = Path(shutil.copytree(chain.runs, tmp_path / "runs"))
    (copy / "predict" / "predictions.csv").write_text(OLD)
    return copy


def predict(runs: Path, *options: object, fault: str | None = None) -> Result:
    changes = {"FAULT": fault, "PYTHONPATH": str(HOOK)} if fault else {}
    return run_script("model_predict.py", "--output-dir", runs, *options, **changes)


def leftovers(runs: Path) -> set[str]:
    """The hidden files of the run directory, except for the lock."""
    return {path.name for path in (runs / "predict").glob(".*")} - {LOCK}


def predictions(runs: Path) -> bytes:
    return (runs / "predict" / "predictions.csv").read_bytes()


def test_killed(chain: Chain, runs: Path) -> None:
    for place, left in ((WRITING, {OUTPUTS}), (MERGING, {OUTPUTS, CSV})):
        killed = predict(runs, fault=f"{place}:1 SIGKILL 0")
        assert killed.status == -9, killed.err
        assert predictions(runs) == OLD.encode()
        assert leftovers(runs) == left
    predict(runs).output()
    assert predictions(runs) == predictions(chain.runs)
    assert leftovers(runs) == set()


def test_a_killed_rank_and_an_error(runs: Path) -> None:
    killed = predict(runs, "--devices", 2, fault=f"{WRITING}:1 SIGKILL 1")
    assert killed.status == 1, killed.err
    assert predictions(runs) == OLD.encode()

    failed = predict(runs, fault=f"{MERGING}:1 OSError 0")
    assert failed.status == 1
    assert "made to fail here" in failed.err
    assert predictions(runs) == OLD.encode()
    assert leftovers(runs) == set()
