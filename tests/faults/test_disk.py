"""Disks that are full or turn read-only: a clear error, and nothing complete is lost."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import BEFORE_STEP, Fault, Training, mounted
from tests.left_behind import list_checkpoints, read_whole

pytestmark = pytest.mark.long


def failed_save(training: Training, why: str) -> None:
    before = [(path, read_whole(path)) for path in list_checkpoints(training.checkpoints)]
    start = training.start()
    assert start.status == 1, start.err
    (line,) = [line for line in start.err.splitlines() if "cannot save" in line]
    assert why in line
    assert "The last complete checkpoint is unchanged." in line
    assert "Traceback" not in start.err
    assert before
    assert [(path, read_whole(path)) for path in list_checkpoints(training.checkpoints)] == before


def test_a_full_disk(tmp_path: Path, never_stopped: dict[str, Any]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk; test_exact.py limits the size of files")
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", "size=16m", "tmpfs"):
        training = Training(disk)
        start = training.start(Fault(BEFORE_STEP, 8, name="SIGTERM"))
        assert start.status == 143, start.err
        ballast = disk / "ballast"
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        ballast.write_bytes(bytes(free - 1_000_000))  # less than a checkpoint takes
        failed_save(training, "MB are free on this disk")
        ballast.unlink()
        assert training.start().status == 0
        assert training.result() == never_stopped


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield
        folder.chmod(0o700)
        return
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield


def test_a_folder_that_turned_read_only(tmp_path: Path, never_stopped: dict[str, Any]) -> None:
    training = Training(tmp_path)
    start = training.start(Fault(BEFORE_STEP, 8, name="SIGTERM"))
    assert start.status == 143, start.err
    with read_only(training.checkpoints):
        failed_save(training, "Read-only" if os.geteuid() == 0 else "Permission denied")
    assert training.start().status == 0
    assert training.result() == never_stopped
