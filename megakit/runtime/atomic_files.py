"""Writes each file or folder completely or not at all, and finds names that are free."""

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replaced_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Opens a new file that replaces `path` in one step at the end of the block.

    The new content is then on disk. If the block raises an error, `path` is unchanged.
    """
    partial = partial_path(path)
    with partial.open("wb") as file:
        yield file
    publish(partial, path)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file in one step when the new content is on disk; encodes text as UTF-8."""
    with replaced_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces a JSON file in one step."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def publish(partial: Path, final: Path) -> None:
    """Waits until a file or folder is on disk, then gives it its final name."""
    for path in (partial, *partial.rglob("*")):
        _flush(path)
    partial.replace(final)
    _flush(final.parent)


def _flush(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial_path(path: Path) -> Path:
    """Returns the hidden path of a file or folder that is not complete yet."""
    return path.with_name(f".{path.name}.partial")


def remove_partial(folder: Path) -> None:
    """Removes incomplete files and folders that a killed program left in a folder."""
    for path in folder.glob(".*.partial"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def set_aside(path: Path, name: str) -> Path:
    """Renames a file or folder; if the name is taken, the first free number is appended to it."""
    numbered = (f"{name}.{number}" for number in itertools.count(1))
    paths = (path.with_name(one) for one in itertools.chain([name], numbered))
    return path.rename(next(one for one in paths if not one.exists()))
