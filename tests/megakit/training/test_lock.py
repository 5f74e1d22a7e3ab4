"""The lock of a run directory goes with its process, and with that process alone."""

import os
import time
from pathlib import Path

from megakit.training.runs import RunDirectory, lock


def test_children_do_not_hold_it(tmp_path: Path) -> None:
    """A data loader's worker outlives a killed run by seconds."""
    directory = RunDirectory(tmp_path / "run")
    guard = lock(directory)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        time.sleep(0.2)
        guard.close()
        lock(directory).close()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
