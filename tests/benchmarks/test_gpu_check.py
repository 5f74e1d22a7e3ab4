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


def command(results: Path, *rows: object) -> list[str]:
    """Short trainings on the small data set."""
    given = ("--write", "--results", results, "--dataset", "digits", "--max-steps", 2)
    return [*map(str, (CHECK, *given, *rows))]


@pytest.mark.long
def test_a_cut_keeps_the_rows_and_the_others_follow_a_failure(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    variables: dict[str, Any] = rehearsed(1, PYTHON=sys.executable, https_proxy=CLOSED_PROXY)
    with subprocess.Popen(
        command(results, "speed"), env=environment(**variables), start_new_session=True
    ) as check:
        while OURS not in (results.read_text() if results.exists() else ""):
            assert check.poll() is None
            time.sleep(0.05)
        os.killpg(check.pid, signal.SIGKILL)
    rows = ("--dataset", "mnist", "--data-dir", tmp_path, "two-gpus", "vit", "gpt")
    assert run(*command(results, *rows), **variables).status == 1
    text = results.read_text()
    for row in (
        *(OURS, "| steps/s, micro batch 128 | | not complete |"),
        *("| two ranks, NCCL | 0 | skipped: one GPU", "| FAILED: exit status 2 of examples/vit/"),
    ):
        assert row in text
    (gpt,) = [line for line in text.splitlines() if line.startswith("| examples/gpt, a few steps")]
    assert gpt.endswith("| passed |")
