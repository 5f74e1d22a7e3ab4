"""A run directory has one writer, which notices when the directory is taken away from it."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from megakit.errors import RunDirectoryLostError
from megakit.job.runs import LOCK_FILE, RunDirectory, check_still_ours, lock
from tests.hostile import problem


def test_one_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    with lock(folder).file:
        told = problem(lock, folder)
        for part in (f"{folder} is in use by process {os.getpid()} ", "--output-dir"):
            assert part in told
        lock(tmp_path / "runs" / "second").file.close()
    lock(folder).file.close()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", fail)
    told = problem(lock, tmp_path / "first")
    for part in (str(tmp_path / "first" / LOCK_FILE), "No locks available", "--output-dir"):
        assert part in told


def test_a_directory_that_was_removed_or_replaced(tmp_path: Path) -> None:
    """The open file keeps its inode from being given to the new lock file."""
    folder = tmp_path / "first"
    own = lock(folder)
    check_still_ours(folder, own.inode)
    shutil.rmtree(folder)
    with pytest.raises(RunDirectoryLostError, match=f"{folder} was removed or renamed"):
        check_still_ours(folder, own.inode)
    with lock(folder).file, pytest.raises(RunDirectoryLostError, match=f"{folder} was replaced"):
        check_still_ours(folder, own.inode)
    own.file.close()


def test_an_old_run_is_set_aside_under_the_first_free_name(tmp_path: Path) -> None:
    for expected in ("first.1", "first.2"):
        directory = RunDirectory(tmp_path / "first")
        directory.path.mkdir()
        assert directory.set_aside() == tmp_path / expected


def test_a_withdrawn_run_gives_its_place_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "first")
    (directory.path / "checkpoints" / "step=000001").mkdir(parents=True)
    old = directory.set_aside()
    directory.path.mkdir()
    directory.write({"seed": 1}, {})
    assert directory.withdraw(old)
    assert not old.exists()
    assert not directory.withdraw(None), "a run with a checkpoint stays"
