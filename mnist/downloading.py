"""Downloads MNIST's files from mirrors, within limits of time and size."""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megakit.errors import printable
from mnist.digits import GZIP
from mnist.idx_files import MNIST_SHA256

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
#: Time limit for a mirror's first answer, and for each further read.
CONNECT_SECONDS = 5.0
#: Time limit for all four files, 12 MB together.
DOWNLOAD_SECONDS = 120.0


class DownloadError(Exception):
    """MNIST cannot be downloaded; the message is a part of a sentence."""


def download(sizes: Mapping[str, int], folder: Path, report: Callable[[str], object]) -> None:
    """Downloads and checks files, and only then writes them.

    Args:
        sizes: The size in bytes of each unpacked file, by name.
        folder: The folder for the files.
        report: Called with each line that the user should see.

    Raises:
        DownloadError: No mirror has all files, or the folder cannot be written.
    """
    from urllib.parse import urlsplit

    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise DownloadError(f"{nearest} cannot be written")
    deadline = time.monotonic() + DOWNLOAD_SECONDS
    contents: dict[str, bytes] = {}
    failures = []
    for mirror in MIRRORS:
        try:
            for name, size in sizes.items():
                if name not in contents:
                    contents[name] = _fetch(name, size, mirror, deadline, report)
        except Exception as error:  # urllib can raise any exception for a malformed answer
            failures.append(printable(f"{urlsplit(mirror).hostname}: {_reason(error)}"))
    if len(contents) < len(sizes):
        raise DownloadError("; ".join(failures))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            _write(folder / name, content)
    except OSError as error:
        raise DownloadError(f"{folder} cannot be written: {_reason(error)}") from None


def _fetch(
    name: str, size: int, mirror: str, deadline: float, report: Callable[[str], object]
) -> bytes:
    """Downloads and unpacks one file; raises an OSError if it differs from the published file."""
    content = bytearray()
    unpacker = zlib.decompressobj(wbits=GZIP)
    with _open_url(f"{mirror}{name}.gz") as response:
        report(printable(f"Downloading {response.url}"))
        # Bound the size and the time, as a mirror may send endlessly. The sha256 checks the rest.
        while len(content) <= size and not unpacker.eof and (chunk := response.read1(1 << 16)):
            content += unpacker.decompress(chunk, size + 1 - len(content))
            if time.monotonic() > deadline:
                raise TimeoutError(f"not complete after {DOWNLOAD_SECONDS:g} s")
    if hashlib.sha256(content).hexdigest() != MNIST_SHA256[name]:
        raise OSError(f"sent {len(content):,} bytes that are not {name}")
    return bytes(content)


def _open_url(url: str) -> Any:
    """Opens the URL within `CONNECT_SECONDS`, even if the DNS lookup takes longer.

    A DNS lookup takes a minute behind some firewalls. urllib's timeout does not include the lookup,
    and nothing can interrupt the lookup. So a daemon thread opens the URL, and after the time limit
    the caller stops waiting for the thread.
    """
    from queue import Empty, SimpleQueue
    from threading import Thread
    from urllib.request import urlopen

    answers: SimpleQueue[Any] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urlopen(url, timeout=CONNECT_SECONDS))
        except Exception as error:
            answers.put(error)

    Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=CONNECT_SECONDS)
    except Empty:
        raise TimeoutError(f"no response within {CONNECT_SECONDS:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _write(path: Path, content: bytes) -> None:
    """Writes the file atomically, so that several jobs can write it at the same time."""
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _reason(error: Exception) -> object:
    """Returns an error's message without the error number and without urllib's wrapper."""
    cause = getattr(error, "reason", error)
    return getattr(cause, "strerror", None) or cause
