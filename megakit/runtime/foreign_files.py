"""Reads files that this program may not have written, if they are regular and not too large."""

import os
import stat
from pathlib import Path

#: Largest accepted JSON file of a run or checkpoint.
JSON_BYTES = 64 << 20


def read_regular_file(path: Path, limit: int) -> bytes:
    """Reads a whole file, if it is a regular file of bounded size.

    Args:
        path: The file. Opening a FIFO does not block.
        limit: The largest accepted size in bytes.

    Raises:
        OSError: The file cannot be opened or read.
        ValueError: The file is a directory, FIFO or device, or larger than `limit`.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        size = _bounded_size(os.fstat(file.fileno()), limit)
        content = file.read(size + 1)  # `read` allocates the requested size
        if len(content) > size:
            content += file.read(limit + 1 - len(content))
    if len(content) > limit:  # /proc files have size 0, and a file may grow
        raise ValueError(f"more than {limit:,} bytes")
    return content


def regular_file_size(path: Path, limit: int) -> int:
    """Returns a file's size without opening it; raises errors as `read_regular_file` does."""
    return _bounded_size(path.stat(), limit)


def _bounded_size(status: os.stat_result, limit: int) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_size > limit:
        raise ValueError(f"{status.st_size:,} bytes; at most {limit:,} are accepted")
    return status.st_size


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file without waiting; opening a FIFO would otherwise wait for a writer forever."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
