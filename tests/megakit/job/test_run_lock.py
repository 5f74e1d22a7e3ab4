"""A run directory has one writer, which notices when the directory is taken away from it."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from megakit.errors import RunDirectoryLostError, UserError
from megakit.job.run_lock import LOCK_FILE, check_still_ours, lock


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


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", fail)
    problem = refusal(tmp_path / "first")
    for part in (str(tmp_path / "first" / LOCK_FILE), "No locks available", "--output-dir"):
        assert part in problem


def test_a_directory_that_was_removed_or_replaced(tmp_path: Path) -> None:
    """The open file keeps its inode from being given to the new lock file."""
    guard = lock(tmp_path / "first")
    check_still_ours(guard.folder, guard.inode)
    shutil.rmtree(guard.folder)
    with pytest.raises(RunDirectoryLostError, match=f"{guard.folder} was removed or renamed"):
        check_still_ours(guard.folder, guard.inode)
    other = lock(guard.folder)
    with pytest.raises(RunDirectoryLostError, match=f"{guard.folder} was replaced"):
        check_still_ours(guard.folder, guard.inode)
    other.close()
