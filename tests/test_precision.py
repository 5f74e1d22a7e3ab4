"""The default precision follows the processor."""

import json
from pathlib import Path

import pytest

from tests.scripts import run_script


@pytest.mark.long
def test_a_processor_that_emulates_bfloat16_computes_in_float32(tmp_path: Path) -> None:
    """Emulated, pretraining takes four times as long."""
    script = ("model_pretrain.py", "--dataset", "digits", "--max-steps", 2, "--devices", 2)
    command = (*script, "--accelerator", "cpu", "--output-dir", tmp_path)
    slow = run_script(*command, ONEDNN_MAX_CPU_ISA="AVX2", timeout=200)
    slow.output()
    assert slow.err.count(", 32 (this CPU only emulates bfloat16)\n") == 1
    for name in ("summary.json", "run.json"):
        assert json.loads((tmp_path / "pretrain" / name).read_text())["precision"] == "32"
    # On another processor it is the same run; another choice of the user's is another run.
    elsewhere = run_script(*command, ONEDNN_MAX_CPU_ISA=None)
    assert "already done" in elsewhere.err
    assert "bfloat16" not in elsewhere.err
    refused = run_script(*command, "--precision", "bf16-mixed", ONEDNN_MAX_CPU_ISA="AVX2")
    assert refused.status == 2
    assert "--precision was 32, now bf16-mixed" in refused.err
