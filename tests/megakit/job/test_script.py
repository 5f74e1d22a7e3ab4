"""The frame around every script, as a process."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megakit.runtime.signals import exit_status
from tests.scripts import REPOSITORY, environment


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGTERM, ""), (signal.SIGINT, "Interrupted.\n")]
)
def test_a_signal_before_training_begins(tmp_path: Path, number: int, said: str) -> None:
    """To the script alone. Which statuses there are: tests/megakit/runtime/test_signals.py."""
    script = subprocess.Popen(
        [
            *(sys.executable, REPOSITORY / "model_pretrain.py", "--dataset", "digits"),
            *("--output-dir", tmp_path),
        ],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # The frameworks' import comes next and takes seconds.
        while not (tmp_path / "pretrain" / "run.json").exists():
            assert script.poll() is None
            time.sleep(0.01)
        script.send_signal(number)
        _, err = script.communicate(timeout=60)
        assert script.returncode == exit_status(number), err
        assert err.endswith(said)
        assert "Traceback" not in err
    finally:
        script.kill()
        script.communicate()
