"""Checkpoints as other versions of Python write them."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import harness
from tests.scripts import REPOSITORY, run, run_script

HOOK = Path(__file__).with_name("python_3_11_2")


def test_a_chain_on_python_3_11_2(tmp_path: Path) -> None:
    """It pickles an Enum's member as a call of `getattr`; Megatron's `.metadata` holds one."""
    options = ("--dataset", "digits", "--accelerator", "cpu", "--max-steps", 2)
    common = (*options, "--output-dir", tmp_path)
    run_script("model_pretrain.py", *common, timeout=200, PYTHONPATH=str(HOOK)).output()
    (metadata,) = (tmp_path / "pretrain" / "checkpoints").glob("*/weights/.metadata")
    assert b"getattr" in metadata.read_bytes()
    run_script("model_finetune.py", *common, timeout=200, PYTHONPATH=str(HOOK)).output()


@pytest.mark.long
@pytest.mark.parametrize("is_here_first", [True, False])
def test_another_python_goes_on(tmp_path: Path, is_here_first: bool) -> None:
    """OTHER_VENV names an environment of another Python, which `VENV=... ./run setup` made."""
    named = os.environ.get("OTHER_VENV")
    if not named:
        pytest.skip("OTHER_VENV names no environment of another Python")
    pythons = [Path(sys.executable), Path(named, "bin", "python")]
    first, second = pythons if is_here_first else reversed(pythons)
    two = ("--devices", 2, "--tensor-parallel", 2, "--accelerator", "cpu", "--dataset", "digits")
    common = (*two, "--max-steps", 50, "--output-dir", tmp_path)
    fault: dict[str, Any] = {
        "PYTHONPATH": str(harness.HOOK),
        "FAULT": f"{harness.BEFORE_STEP}:3 SIGTERM 0",
    }
    stopped = run(first, REPOSITORY / "model_pretrain.py", *common, **fault)
    assert stopped.status == 143, stopped.err
    resumed = run(second, REPOSITORY / "model_pretrain.py", *common)
    resumed.output()
    assert "Resuming from" in resumed.err
    run(first, REPOSITORY / "model_finetune.py", *common).output()
    run(second, REPOSITORY / "model_predict.py", *two, "--output-dir", tmp_path).output()
