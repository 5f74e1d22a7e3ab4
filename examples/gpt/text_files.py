"""Finds text files and reads their bytes; by default, the sources of Python's standard library.

The scripts import their options from this module, so it must not import slow packages.
"""

import hashlib
import os
import platform
import sysconfig
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from megakit.errors import UserError, printable, reading
from megakit.runtime.foreign_files import regular_file_size

#: One file in this many is for validation; of a single file, the last part of this many.
VALIDATION_PART = 50
#: A text of at most this many bytes is read into memory.
MEMORY_BYTES = 1 << 28
#: A file of more bytes than this is refused.
FILE_BYTES = 1 << 50
CHUNK_BYTES = 1 << 20
REMEDY = "Name a text file, or a folder of text files that you may read."
#: Folders below the standard library's that do not belong to it, or that are not always installed.
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Span:
    """Describes the bytes from `start` up to `stop` of a file."""

    path: Path
    start: int
    stop: int


class Text:
    """Provides the bytes of several spans as one text.

    Args:
        spans: Parts of files, in the order of the text.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = [span for span in spans if span.start < span.stop]
        self._ends = list(accumulate(span.stop - span.start for span in self._spans))
        self._memory = self._read(0, len(self)) if len(self) <= MEMORY_BYTES else None

    def __len__(self) -> int:
        """Returns the number of bytes."""
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> bytes:
        """Returns the bytes from `start` up to `stop`, or up to the end of the text.

        Raises:
            UserError: A file cannot be read, or is shorter than when it was found.
        """
        if self._memory is not None:
            return self._memory[start:stop]
        return self._read(start, min(stop, len(self)))

    def chunks(self) -> Iterator[bytes]:
        """Yields the bytes in parts of at most `CHUNK_BYTES`."""
        for start in range(0, len(self), CHUNK_BYTES):
            yield self.read(start, start + CHUNK_BYTES)

    def _read(self, start: int, stop: int) -> bytes:
        parts = []
        while start < stop:
            place = bisect_right(self._ends, start)
            span, end = self._spans[place], self._ends[place]
            size = min(stop, end) - start
            parts.append(_read_part(span.path, span.stop - (end - start), size))
            start += size
        return b"".join(parts)


def _read_part(path: Path, start: int, size: int) -> bytes:
    """Reads a part of a file. A memory map would end the process if the file had become shorter."""
    with reading(path, "Copy the file again, or remove it."):
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(size)
        if len(content) < size:
            raise ValueError(f"it has become shorter than {start + size:,} bytes")
    return content


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
            for chunk in text.chunks():
                digest.update(chunk)
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


def read_splits(text: Path | None) -> tuple[Text, Text]:
    """Returns the text for training and the text for validation.

    The last of the sorted files, and every 50th file before it, are for validation. So no file is
    in both texts, unless there is only one.

    Args:
        text: A file, a folder, or None for Python's standard library.

    Raises:
        UserError: There is no text, or a file cannot be read.
    """
    spans = find_spans(text)
    if len(spans) == 1:
        (whole,) = spans
        cut = whole.stop - whole.stop // VALIDATION_PART
        training, validation = [Span(whole.path, 0, cut)], [Span(whole.path, cut, whole.stop)]
    else:
        places = range(len(spans) - 1, -1, -VALIDATION_PART)
        validation = [spans[place] for place in places]
        training = [span for place, span in enumerate(spans) if place not in places]
    splits = Text(training), Text(validation)
    if min(map(len, splits)) < 2:  # one byte is not a token and the next token
        sizes = " and ".join(f"{len(split):,}" for split in splits)
        raise UserError(
            f"--text {text}: has {sizes} bytes for training and validation. Each needs at least 2. "
            "Choose a longer text."
        )
    return splits


def find_spans(text: Path | None) -> list[Span]:
    """Returns the files of a text, sorted by path; empty and hidden files are left out.

    Raises:
        UserError: There is no such file or folder, no file, or something other than a file.
    """
    folder = find_standard_library() if text is None else text
    left_out, suffix = (NOT_THE_LIBRARY, ".py") if text is None else (set(), "")
    with reading(f"--text {printable(os.fspath(folder))}", REMEDY):
        paths = sorted(_walk(folder, left_out, suffix)) if folder.is_dir() else [folder]
    spans = []
    for path in paths:
        with reading(f"--text {printable(os.fspath(path))}", REMEDY):
            spans.append(Span(path, 0, regular_file_size(path, FILE_BYTES)))
    spans = [span for span in spans if span.stop]
    if not spans:
        raise UserError(
            printable(f"--text {folder}: contains no text. Name a file, or a folder of text files.")
        )
    return spans


def find_standard_library() -> Path:
    """Returns the folder of the standard library of this Python."""
    return Path(sysconfig.get_paths()["stdlib"])


def _walk(folder: Path, left_out: Collection[str], suffix: str) -> Iterator[Path]:
    """Yields the files with a suffix in a folder and below it, except in the folders left out."""

    def refuse(error: OSError) -> None:
        raise error

    # Links to folders are not followed: they may lead in a circle.
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name not in left_out]
        yield from (
            Path(parent, name) for name in files if name[0] != "." and name.endswith(suffix)
        )
