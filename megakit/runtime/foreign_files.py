"""Reads files that this program may not have written; a bad file causes one clear message."""

import contextlib
import os
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from megakit.errors import UserError

#: Largest accepted JSON file of a run or checkpoint.
JSON_BYTES = 64 << 20
#: What messages about a checkpoint's files end with.
USE_ANOTHER = "The checkpoint is damaged or unsafe. Use another checkpoint."


@contextlib.contextmanager
def reading(what: object, remedy: str) -> Iterator[None]:
    """Turns every error while a file is read into one `UserError`.

    Hostile input makes parsers raise errors of any type, such as `RecursionError`.

    Args:
        what: The file, or the option that names the file; the message begins with it.
        remedy: What the user can do, as a full sentence.

    Raises:
        UserError: The `with` block raised an error.
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
    """Escapes characters that break a line or control a terminal, e.g. newlines in file names."""
    return "".join(
        char
        if char.isprintable() or unicodedata.category(char) == "Zs"  # spaces of all kinds
        else char.encode("unicode_escape", "backslashreplace").decode()
        for char in text
    )


def brief(text: str) -> str:
    """Returns a printable text; shortens a text of more than 200 characters to 163 characters."""
    return printable(text if len(text) <= 200 else f"{text[:100]}...{text[-60:]}")


def reason_of(error: Exception) -> str:
    """Returns the system's reason for an error, or the error's type and first line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line, kind = str(error).partition("\n")[0][:200], type(error).__name__
    if not line:
        return kind
    # Messages of these types make sense without the type; the message of a KeyError is its key.
    return line if isinstance(error, ValueError | TypeError) else f"{kind}: {line}"


def first(problems: list[str], most: int = 20) -> list[str]:
    """Returns all problems, or the first problems with the number of further problems."""
    more = len(problems) - most
    return problems if more <= 0 else [*problems[:most], f"{more:,} more like these."]


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
