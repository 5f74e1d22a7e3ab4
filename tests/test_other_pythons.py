"""Checkpoints as another version of Python writes them."""

from pathlib import Path

import pytest

from tests.scripts import run_script

HOOK = Path(__file__).with_name("python_3_11_2")


@pytest.mark.long
def test_a_chain_on_python_3_11_2(tmp_path: Path) -> None:
    """It pickles an Enum's member as a call of `getattr`; Megatron's `.metadata` holds one."""
    options = ("--dataset", "digits", "--accelerator", "cpu", "--max-steps", 2)
    common = (*options, "--output-dir", tmp_path)
    run_script("model_pretrain.py", *common, timeout=200, PYTHONPATH=str(HOOK)).output()
    (metadata,) = (tmp_path / "pretrain" / "checkpoints").glob("*/weights/.metadata")
    assert b"getattr" in metadata.read_bytes()
    run_script("model_finetune.py", *common, timeout=200, PYTHONPATH=str(HOOK)).output()
