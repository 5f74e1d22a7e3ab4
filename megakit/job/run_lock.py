"""Locks a run directory for one job, which checks the lock again before each write."""

import contextlib
import fcntl
import os
import socket
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megakit.errors import RunDirectoryLostError, UserError

LOCK_FILE = ".lock"


@dataclass(frozen=True)
class RunLock:
    """A lock that this process holds.

    Attributes:
        folder: The run directory.
        inode: Device and inode number of the lock file.
        file: The open lock file; closing it releases the lock.
    """

    folder: Path
    inode: tuple[int, int]
    file: IO[str]

    def close(self) -> None:
        """Releases the lock."""
        self.file.close()


def lock(folder: Path) -> RunLock:
    """Locks a run directory against other processes until the lock is closed or this process ends.

    The lock file is in the directory itself, so two paths to one directory share one lock.

    Args:
        folder: The run directory; created if it does not exist.

    Raises:
        UserError: Another process uses the directory, or the file system has no locks.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+")
        close_in_children(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                holder = file.read().strip() or "another process"
            raise UserError(
                f"{folder} is in use by {holder}. Wait for it, end it, or use another --output-dir."
            ) from None
        except OSError as error:
            file.close()
            raise UserError(
                f"{folder / LOCK_FILE}: cannot be locked ({error.strerror}). "
                "Use an --output-dir on a file system that supports locks."
            ) from error
        status = os.fstat(file.fileno())
        if lock_inode(folder) == (status.st_dev, status.st_ino):
            break
        file.close()  # the directory was renamed between opening and locking
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return RunLock(folder, (status.st_dev, status.st_ino), file)


def lock_inode(folder: Path) -> tuple[int, int] | None:
    """Returns device and inode number of a run directory's lock file; None without such a file."""
    try:
        status = (folder / LOCK_FILE).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_still_ours(folder: Path, inode: tuple[int, int]) -> None:
    """Checks that a run directory is still the directory that was locked.

    Args:
        folder: The run directory.
        inode: Device and inode number of the lock file when it was locked.

    Raises:
        RunDirectoryLostError: The directory was removed, renamed or replaced.
    """
    found = lock_inode(folder)
    if found == inode:
        return
    what = "was removed or renamed" if found is None else "was replaced by another run's"
    raise RunDirectoryLostError(
        f"{folder} {what} while this run was writing to it, and its checkpoints with it. "
        "Nothing more can be saved; this run ends."
    )


def close_in_children(file: IO[str]) -> None:
    """Closes a locked file in forked processes, such as data loader workers.

    A forked process shares the lock and may outlive its parent by seconds.
    """
    reference = weakref.ref(file)

    def close() -> None:
        if (inherited := reference()) is not None:
            with contextlib.suppress(OSError):
                inherited.close()

    os.register_at_fork(after_in_child=close)
