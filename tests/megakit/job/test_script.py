"""The frame around every script, as a process."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripts import REPOSITORY, environment


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_training_begins_ends_with_143(tmp_path: Path, number: int):
    script = subprocess.Popen(
        [
            *(sys.executable, REPOSITORY / "model_pretrain.py", "--dataset", "digits"),
            *("--output-dir", tmp_path),
        ],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        # The frameworks' import comes next and takes seconds.
        while not (tmp_path / "pretrain" / "run.json").exists():
            assert script.poll() is None
            time.sleep(0.01)
        script.send_signal(number)
        assert script.wait(timeout=60) == 143
    finally:
        script.kill()
