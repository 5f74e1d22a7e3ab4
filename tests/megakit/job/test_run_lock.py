"""A run directory has one writer, which notices when the directory is taken away from it."""

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megakit.errors import RunDirectoryLostError, UserError
from megakit.job.run_lock import LOCK_FILE, RunLock, check_still_ours, lock
from megakit.job.runs import RunDirectory
from tests.scripts import REPOSITORY


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        lock(folder)
    return str(error.value)


def test_one_at_a_time(tmp_path: Path) -> None:
    guard = lock(tmp_path / "runs" / "first")
    problem = refusal(tmp_path / "runs" / "first")
    for part in (str(tmp_path / "runs" / "first"), f"process {os.getpid()} ", "--output-dir"):
        assert part in problem
    lock(tmp_path / "runs" / "second").close()
    guard.close()
    lock(tmp_path / "runs" / "first").close()


def test_the_file_names_only_the_last_holder(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("process 123456789 on a machine with a long name\n")
    guard = lock(tmp_path)
    (line,) = (tmp_path / LOCK_FILE).read_text().splitlines()
    assert line == f"process {os.getpid()} on {socket.gethostname()}"
    guard.close()


def test_a_holder_that_has_not_yet_written_its_name(tmp_path: Path) -> None:
    with (tmp_path / LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert f"{tmp_path} is in use by another process." in refusal(tmp_path)


def test_a_directory_that_is_renamed_while_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is that of the directory that has the name afterwards."""
    folder, flock = tmp_path / "run", fcntl.flock

    def renamed_meanwhile(*arguments: Any) -> None:
        if not (tmp_path / "old").exists():
            folder.rename(tmp_path / "old")
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", renamed_meanwhile)
    guard = lock(folder)
    check_still_ours(folder, guard.inode)
    lock(tmp_path / "old").close()
    guard.close()


def test_two_paths_to_one_directory_are_one_lock(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    guard = lock(tmp_path / "runs" / "first")
    assert "in use" in refusal(tmp_path / "link" / "first")
    guard.close()


def test_it_moves_with_the_directory_when_the_old_run_is_set_aside(tmp_path: Path) -> None:
    guard = lock(tmp_path / "first")
    aside = RunDirectory(tmp_path / "first").rename()
    assert aside is not None
    assert "in use" in refusal(aside)
    lock(tmp_path / "first").close()
    guard.close()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", fail)
    problem = refusal(tmp_path / "first")
    for part in (str(tmp_path / "first" / LOCK_FILE), "No locks available", "--output-dir"):
        assert part in problem


class TestCheck:
    @pytest.fixture
    def guard(self, tmp_path: Path) -> RunLock:
        return lock(tmp_path / "first")

    def test_nothing_happened(self, guard: RunLock) -> None:
        check_still_ours(guard.folder, guard.inode)

    def test_removed(self, guard: RunLock) -> None:
        shutil.rmtree(guard.folder)
        with pytest.raises(RunDirectoryLostError, match=f"{guard.folder} was removed or renamed"):
            check_still_ours(guard.folder, guard.inode)

    def test_replaced(self, guard: RunLock) -> None:
        """The open file keeps its inode from being given to the new lock file."""
        shutil.rmtree(guard.folder)
        other = lock(guard.folder)
        with pytest.raises(RunDirectoryLostError, match=f"{guard.folder} was replaced"):
            check_still_ours(guard.folder, guard.inode)
        other.close()

    def test_only_the_lock_file_removed(self, guard: RunLock) -> None:
        """Another process could lock the directory now."""
        (guard.folder / LOCK_FILE).unlink()
        with pytest.raises(RunDirectoryLostError):
            check_still_ours(guard.folder, guard.inode)


def test_the_end_of_a_process_releases_it_however_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from megakit.job.run_lock import lock\n"
        "guard = lock(Path(sys.argv[1])); print('locked', flush=True)\n"
        "time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, folder], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        assert f"process {other.pid} " in refusal(folder)
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    lock(folder).close()


def test_children_do_not_hold_it(tmp_path: Path) -> None:
    """A data loader's worker outlives a killed run by seconds."""
    folder = tmp_path / "run"
    guard = lock(folder)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        time.sleep(0.2)
        guard.close()
        lock(folder).close()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
