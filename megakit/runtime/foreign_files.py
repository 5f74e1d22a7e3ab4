"""Reads files that this program may not have written, so that a bad one is one clear message."""

import contextlib
import os
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from megakit.errors import UserError

#: No JSON file of a run or checkpoint is larger.
JSON_BYTES = 64 << 20


@contextlib.contextmanager
def reading(what: object, remedy: str) -> Iterator[None]:
    """Turns whatever goes wrong while a file is read into one `UserError`.

    Parsers fail in every possible way on hostile input: `RecursionError`, `MemoryError`,
    `OverflowError` and `struct.error` besides the expected `ValueError` and `OSError`.

    Args:
        what: The file, or the option that names it; the message begins with it.
        remedy: What the user can do, as a full sentence.

    Raises:
        UserError: Something went wrong inside the `with` block.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            printable(f"{what}: cannot be read ({reason_of(error)}). {remedy}")
        ) from error


def printable(text: str) -> str:
    """Escapes what would break a line or command a terminal, such as newlines in a file's name."""
    return "".join(
        char
        if char.isprintable() or unicodedata.category(char) == "Zs"  # spaces of all kinds
        else char.encode("unicode_escape", "backslashreplace").decode()
        for char in text
    )


def brief(text: str) -> str:
    """A text as `printable` shows it, of at most 163 characters if it has no escapes."""
    return printable(text if len(text) <= 200 else f"{text[:100]}...{text[-60:]}")


def reason_of(error: Exception) -> str:
    """Returns the system's reason for an error, or its first line with its type."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line, kind = str(error).partition("\n")[0][:200], type(error).__name__
    # The messages of these two make sense alone; a KeyError's is only the key.
    if line and isinstance(error, ValueError | TypeError):
        return line
    return f"{kind}: {line}" if line else kind


def first(problems: list[str], most: int = 20) -> list[str]:
    """The problems, or so many of them that they can be read, and how many more there are."""
    if len(problems) <= most:
        return problems
    return [*problems[:most], f"{len(problems) - most:,} more like these."]


def read_regular_file(path: Path, limit: int) -> bytes:
    """Reads a whole file, if it is a regular file of bounded size.

    Args:
        path: The file. Opening a FIFO does not block.
        limit: The largest accepted size in bytes.

    Raises:
        OSError: The file cannot be opened or read.
        ValueError: It is a directory, FIFO or device, or larger than `limit`.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        size = _bounded_size(os.fstat(file.fileno()), limit)
        content = file.read(size + 1)  # `read` allocates what it is asked for
        if len(content) > size:
            content += file.read(limit + 1 - len(content))
    if len(content) > limit:  # /proc files have size 0, and a file may grow
        raise ValueError(f"more than {limit:,} bytes")
    return content


def regular_file_size(path: Path, limit: int) -> int:
    """Returns a file's size without opening it; what `read_regular_file` refuses, raises here."""
    return _bounded_size(path.stat(), limit)


def _bounded_size(status: os.stat_result, limit: int) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_size > limit:
        raise ValueError(f"{status.st_size:,} bytes; at most {limit:,} are accepted")
    return status.st_size


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file without waiting for a writer, which a FIFO would otherwise do for ever."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
