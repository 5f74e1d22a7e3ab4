"""The check of a GPU, on a rehearsed one: it keeps what it has, and goes on after a failure."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import CLOSED_PROXY
from tests.scripts import REPOSITORY, environment, rehearsed, run

CHECK = REPOSITORY / "benchmarks" / "gpu_check.sh"
OURS = "| model_pretrain.py, micro batch 128 | "
NOT_COMPLETE = "| steps/s, micro batch 128 | | not complete |"


def command(results: Path, *rows: object) -> list[str]:
    """Short trainings on the small data set."""
    given = ("--write", "--results", results, "--dataset", "digits", "--max-steps", 2)
    return [*map(str, (CHECK, *given, *rows))]


@pytest.fixture
def variables() -> dict[str, Any]:
    return rehearsed(1, PYTHON=sys.executable, https_proxy=CLOSED_PROXY)


@pytest.mark.long
def test_a_cut_keeps_the_rows(tmp_path: Path, variables: dict[str, Any]) -> None:
    results = tmp_path / "RESULTS.md"
    with subprocess.Popen(
        command(results, "speed"), env=environment(**variables), start_new_session=True
    ) as check:
        while OURS not in (results.read_text() if results.exists() else ""):
            assert check.poll() is None
            time.sleep(0.05)
        os.killpg(check.pid, signal.SIGKILL)
    assert NOT_COMPLETE in results.read_text()

    assert run(*command(results, "two-gpus"), **variables).status == 0
    text = results.read_text()
    assert OURS in text
    assert NOT_COMPLETE in text
    assert "| two ranks, NCCL | 0 | skipped: one GPU" in text


@pytest.mark.long
def test_the_other_rows_follow_a_failure(tmp_path: Path, variables: dict[str, Any]) -> None:
    results = tmp_path / "RESULTS.md"
    rows = ("--dataset", "mnist", "--data-dir", tmp_path, "vit", "gpt")
    assert run(*command(results, *rows), **variables).status == 1
    lines = results.read_text().splitlines()
    found = {line.split(" | ")[0]: line for line in lines if "a few steps" in line}
    assert "| FAILED: exit status 2 of examples/vit/" in found["| examples/vit, a few steps"]
    assert found["| examples/gpt, a few steps"].endswith("| passed |")
