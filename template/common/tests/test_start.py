"""Tests that the scripts show --help, reject invalid options, and use this project's megakit."""

import sys
from pathlib import Path

import pytest

import megakit
from tests.scripts import REPOSITORY, run_script

SCRIPTS = [path.name for path in REPOSITORY.glob("model_*.py") if "run_script(" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str) -> None:
    done = run_script(script, "--help")
    assert done.status == 0, done.err
    assert "--output-dir" in done.out


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_cannot_be_is_refused_and_leaves_nothing(script: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = run_script(script, "--devices", 0, "--timeout", -1, "--output-dir", runs)
    assert done.status == 2
    assert "--devices" in done.err
    assert "--timeout" in done.err
    assert "Traceback" not in done.err
    assert not runs.exists()


def test_megakit_is_the_one_of_the_lock() -> None:
    """Not another megakit from PYTHONPATH or from a folder of this name."""
    assert Path(megakit.__file__).is_relative_to(sys.prefix)
