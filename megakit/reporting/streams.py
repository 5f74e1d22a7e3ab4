"""Protects standard streams: a closed pipe or a lost terminal does not end a run."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

#: Errors of a write without a reader: a closed pipe, a lost terminal, a closed descriptor.
GONE = frozenset({errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO})


class LastingFile(io.FileIO):
    """Writes to a descriptor, and to another file after the descriptor's reader has gone.

    Args:
        descriptor: A descriptor that is open for writing.
        is_result: Whether to raise errors other than a missing reader, such as a full disk.
            Otherwise, such an error is treated like a missing reader.
    """

    def __init__(self, descriptor: int, is_result: bool) -> None:
        super().__init__(descriptor, "w", closefd=descriptor > 2)
        os.set_blocking(descriptor, True)  # some parent processes leave a pipe non-blocking
        self.is_result, self.is_lost = is_result, False
        self.instead: str | Path = os.devnull

    def write(self, data: Any) -> int:
        """Writes to the descriptor or the other file; drops data that neither accepts.

        Raises:
            OSError: A result cannot be written, for example to a full disk.
        """
        try:
            while (written := super().write(data)) is None:
                os.set_blocking(self.fileno(), True)  # another process made it non-blocking
            return written
        except OSError as error:
            if self.is_result and error.errno not in GONE:
                raise
            if self.is_lost:
                return len(data)
        self.is_lost = True
        self._redirect()
        return self.write(data)

    def fall_back_to(self, path: Path) -> None:
        """Sets the file that receives the data after the reader has gone."""
        self.instead = path
        if self.is_lost:
            self._redirect()

    def _redirect(self) -> None:
        # Replaces the descriptor itself, because C++ libraries write to it as well.
        for path in (self.instead, os.devnull):
            with contextlib.suppress(OSError):
                redirect(path, self.fileno(), inheritable=self.fileno() <= 2)
                return


def redirect(path: Path | str, *descriptors: int, inheritable: bool = True) -> None:
    """Lets descriptors append to a file."""
    other = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in descriptors:
        os.dup2(other, descriptor, inheritable)
    os.close(other)


def secure_streams() -> None:
    """Prepares descriptors 0, 1 and 2, `sys.stdout` and `sys.stderr` at the start of a script.

    A closed descriptor is opened on /dev/null. Otherwise the next opened file, for example a
    checkpoint, would get the number of the descriptor and receive messages.
    """
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # uses the lowest free number, which is this one
            os.set_inheritable(descriptor, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if lasting_file(stream) is None:
            if stream is not None:
                stream.flush()
            lasting = open_stream(descriptor, is_result=descriptor == 1, like=stream)
            setattr(sys, name, lasting)
            setattr(sys, f"__{name}__", lasting)


def open_stream(descriptor: int, is_result: bool, like: TextIO | None = None) -> TextIO:
    """Opens a text stream on a `LastingFile`, like another stream, or line-buffered in UTF-8."""
    return io.TextIOWrapper(
        io.BufferedWriter(LastingFile(descriptor, is_result)),
        encoding=getattr(like, "encoding", "utf-8"),
        errors=getattr(like, "errors", "replace"),
        line_buffering=getattr(like, "line_buffering", True) or getattr(like, "write_through", 0),
    )


def lasting_file(stream: TextIO | None) -> LastingFile | None:
    """Returns the `LastingFile` below a text stream, or None."""
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, LastingFile) else None


@contextlib.contextmanager
def diverted(log: Path | str = os.devnull) -> Iterator[None]:
    """Redirects the output of Python and C++ to a file inside the `with` block.

    A notebook's `sys.stdout` is not a file, and a logger keeps the stream that exists at the
    logger's creation. Therefore `sys.stdout` and `sys.stderr` are set to the process's original
    streams, and descriptors 1 and 2 are redirected to the file.

    Args:
        log: The file to append to; by default, the output is dropped.
    """
    real_out, real_err = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
    streams = (sys.stdout, sys.stderr, real_out, real_err)
    for stream in streams:
        stream.flush()
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    try:
        redirect(log, 1, 2)
        with contextlib.redirect_stdout(real_out), contextlib.redirect_stderr(real_err):
            yield
    finally:
        for stream in streams:
            stream.flush()
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)
