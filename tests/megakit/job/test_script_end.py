"""How a script ends."""

import pstats
from pathlib import Path

import pytest

from tests.scripts import run_python


@pytest.mark.long
def test_a_profiler_writes_its_file(tmp_path: Path) -> None:
    """A script ends with os._exit, before which cProfile would not have written anything."""
    profile = tmp_path / "profile.out"
    options = ("--dataset", "digits", "--accelerator", "cpu", "--max-steps", 2)
    command = ("-m", "cProfile", "-o", profile, "model_pretrain.py", *options)
    assert run_python(*command, "--output-dir", tmp_path / "runs").output()
    functions = {name for _, _, name in pstats.Stats(str(profile)).stats}  # type: ignore[attr-defined]
    # Not `train`: from Python 3.12 on, cProfile mixes the calls of all threads and loses the
    # outermost functions.
    assert {"training_step", "write_manifest"} <= functions
