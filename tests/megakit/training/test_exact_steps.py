"""A training by `megakit.training.train` that is killed and resumed does what a whole one does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.megakit.training.resumed import CASES
from tests.scripts import REPOSITORY, environment


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By case: the events of the whole training, and of the killed and the resumed one."""
    result = subprocess.run(
        [
            *(sys.executable, str(Path(__file__).with_name("resumed.py"))),
            *(str(tmp_path_factory.mktemp("runs")), *CASES),
        ],
        env=environment(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    told: dict[str, list[Any]] = json.loads(result.stdout.splitlines()[-1])
    return told


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_steps_weights_and_validations(events: dict[str, list[Any]], case: str) -> None:
    whole, parts = events[case]
    assert len(whole) > 6
    assert {kind for kind, *_ in whole} == {"step", "validation"}
    assert parts == whole
