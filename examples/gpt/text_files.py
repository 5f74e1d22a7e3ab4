"""Finds text files and reads their bytes; by default, the sources of Python's standard library.

The scripts import their options from this module, so it must not import slow packages.
"""

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from megakit.errors import UserError, printable, reading

#: One file in this many is for validation; of a single file, the last part of this many.
VALIDATION_PART = 50
REMEDY = "Name a text file, or a folder of text files that you may read."
#: Folders below the standard library's that do not belong to it, or that are not always installed.
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


@dataclass(kw_only=True)
class TextOptions:
    """Options that choose the text."""

    text: Path | None = None
    """A text file, or a folder with text files; by default, the sources of Python's standard
    library."""

    def fingerprint(self) -> str:
        """Reads the text, and returns a name with a digest of its bytes.

        Raises:
            UserError: There is no text, or a file cannot be read.
        """
        digest = hashlib.sha256()
        for text in read_splits(self.text):
            digest.update(f"{len(text)} ".encode())
            digest.update(text)
        origin = f"python-{platform.python_version()}" if self.text is None else "text"
        return f"{origin}-{digest.hexdigest()[:12]}"

    def check_unchanged(self, dataset: str) -> None:
        """Checks in a rank that the text has not changed since the command started.

        Raises:
            UserError: The text has changed, so the ranks might read different texts.
        """
        if self.fingerprint() != dataset:
            raise UserError(
                f"--text {self.text or find_standard_library()}: changed since this command began. "
                "Start the command again."
            )


def read_splits(text: Path | None) -> tuple[bytes, bytes]:
    """Returns the text for training and the text for validation.

    The last of the sorted files, and every 50th file before it, are for validation. So no file is
    in both texts, unless there is only one.

    Args:
        text: A file, a folder, or None for Python's standard library.

    Raises:
        UserError: There is no text, or a file cannot be read.
    """
    contents = read_files(text)
    if len(contents) == 1:
        (whole,) = contents
        cut = len(whole) - len(whole) // VALIDATION_PART
        splits = whole[:cut], whole[cut:]
    else:
        places = range(len(contents) - 1, -1, -VALIDATION_PART)
        training = (content for place, content in enumerate(contents) if place not in places)
        splits = b"".join(training), b"".join(contents[place] for place in places)
    if min(map(len, splits)) < 2:  # one byte is not a token and the next token
        sizes = " and ".join(f"{len(split):,}" for split in splits)
        raise UserError(
            f"--text {text}: has {sizes} bytes for training and validation. Each needs at least 2. "
            "Choose a longer text."
        )
    return splits


def read_files(text: Path | None) -> list[bytes]:
    """Returns the contents of the files, sorted by path, without empty and hidden files."""
    folder = find_standard_library() if text is None else text
    left_out, suffix = (NOT_THE_LIBRARY, ".py") if text is None else (set(), "")
    with reading(f"--text {printable(os.fspath(folder))}", REMEDY):
        paths = sorted(_walk(folder, left_out, suffix)) if folder.is_dir() else [folder]
    contents = []
    for path in paths:
        with reading(f"--text {printable(os.fspath(path))}", REMEDY):
            contents.append(path.read_bytes())
    if not any(contents):
        raise UserError(
            printable(f"--text {folder}: contains no text. Name a file, or a folder of text files.")
        )
    return [content for content in contents if content]


def find_standard_library() -> Path:
    """Returns the folder of the standard library of this Python."""
    return Path(sysconfig.get_paths()["stdlib"])


def _walk(folder: Path, left_out: set[str], suffix: str) -> list[Path]:
    """Lists the files in a folder and below it; links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name not in left_out]
        found += (Path(parent, name) for name in files if name[0] != "." and name.endswith(suffix))
    return found
