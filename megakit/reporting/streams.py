"""Standard streams that outlive their reader: a closed pipe or a lost terminal ends no run."""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

#: Errors of a write whose reader is gone: a closed pipe, a lost terminal, a closed descriptor.
GONE = frozenset({errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO})


class LastingFile(io.FileIO):
    """A descriptor for writing. After its reader has gone, it leads to another file.

    Args:
        descriptor: Open for writing.
        is_result: Whether a full disk is an error. Messages for people are dropped in that case.
    """

    def __init__(self, descriptor: int, is_result: bool) -> None:
        super().__init__(descriptor, "w", closefd=descriptor > 2)
        self.is_result = is_result
        self.is_lost = False
        self.instead: str | Path = os.devnull

    def write(self, data: Any) -> int:
        """Writes, here or to the other file; raises only where a result meets a full disk."""
        while True:
            try:
                written = super().write(data)
            except OSError as error:
                if self.is_result and error.errno not in GONE:
                    raise
                if self.is_lost:
                    return len(data)
                self.is_lost = True
                self._redirect()
                continue
            if written is not None:
                return written
            # A descriptor in non-blocking mode, as some parent processes leave it: wait for room.
            waiting = select.poll()
            waiting.register(self, select.POLLOUT)
            waiting.poll()

    def fall_back_to(self, path: Path) -> None:
        """Sets the file to write to after the reader has gone."""
        self.instead = path
        if self.is_lost:
            self._redirect()

    def _redirect(self) -> None:
        # The descriptor itself, since libraries in C++ write to it as well.
        for path in (self.instead, os.devnull):
            try:
                other = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            except OSError:
                continue
            os.dup2(other, self.fileno(), inheritable=self.fileno() <= 2)
            os.close(other)
            return


def secure_streams() -> None:
    """Prepares descriptors 0, 1 and 2, `sys.stdout` and `sys.stderr` at the start of a script.

    A closed descriptor is opened on /dev/null. Otherwise the next file that is opened, a checkpoint
    for example, would take its number and receive messages.
    """
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest free number, which is this one
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
    """Opens a text stream on a `LastingFile`, line-buffered and UTF-8 or as another stream."""
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
    """Appends what is printed meanwhile to a file, from C++ too, and then lets it through again.

    A notebook's `sys.stdout` is no file, and a logger keeps the stream that it finds when it is
    made. So Python's names lead to the real ones for that time, and those into the file.

    Args:
        log: The file; by default what is printed is dropped.
    """
    real_out, real_err = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
    streams = (sys.stdout, sys.stderr, real_out, real_err)
    for stream in streams:
        stream.flush()
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        for descriptor in kept:
            os.dup2(file, descriptor)
        with contextlib.redirect_stdout(real_out), contextlib.redirect_stderr(real_err):
            yield
    finally:
        for stream in streams:
            stream.flush()
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)
        os.close(file)
