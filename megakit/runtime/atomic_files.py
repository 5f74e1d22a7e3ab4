"""Writes each file completely or not at all."""

import contextlib
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
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file in one step when the new content is on disk; encodes text as UTF-8."""
    with replaced_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def partial_path(path: Path) -> Path:
    """Returns the hidden path of a file or folder that is not complete yet."""
    return path.with_name(f".{path.name}.partial")


def remove_partial(folder: Path) -> None:
    """Removes incomplete files and folders that a killed program left in a folder."""
    for path in folder.glob(".*.partial"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces a JSON file in one step."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")
