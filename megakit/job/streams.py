"""Protects standard streams: a closed pipe or a lost terminal does not end a run."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, TextIO


class Output(io.FileIO):
    """Writes to a descriptor, and to the log after a write to the descriptor has failed.

    Args:
        descriptor: A descriptor that is open for writing.
        is_result: Whether to raise errors other than a missing reader, such as a full disk.

    Attributes:
        log: The log file of this process. Until it is known, a failed write is dropped.
    """

    log: ClassVar[Path | None] = None

    def __init__(self, descriptor: int, is_result: bool) -> None:
        super().__init__(descriptor, "w", closefd=descriptor > 2)
        self.is_result = is_result

    def write(self, data: Any) -> int:
        """Writes to the descriptor or the log.

        Raises:
            OSError: A result cannot be written, for example to a full disk.
        """
        try:
            return super().write(data)
        except OSError as error:
            # The other two: a closed pipe, a lost terminal.
            if self.is_result and error.errno not in (errno.EPIPE, errno.EIO):
                raise
        with contextlib.suppress(OSError):
            if self.log is not None:
                # Replaces the descriptor itself, because C++ libraries write to it as well.
                redirect(self.log, self.fileno())
                return super().write(data)
        return len(data)


def open_output(descriptor: int, is_result: bool) -> TextIO:
    """Opens a text stream on a descriptor; see `Output`."""
    buffer = io.BufferedWriter(Output(descriptor, is_result))
    return io.TextIOWrapper(buffer, "utf-8", "replace", line_buffering=True)


def redirect(path: Path | str, *descriptors: int) -> None:
    """Lets descriptors append to a file."""
    with Path(path).open("ab") as file:
        for descriptor in descriptors:
            os.dup2(file.fileno(), descriptor)


def secure_streams() -> None:
    """Prepares descriptors 0, 1 and 2, `sys.stdout` and `sys.stderr` at the start of a script.

    A closed descriptor is opened on /dev/null. Otherwise the next opened file, for example a
    checkpoint, would get the number of the descriptor and receive messages.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # uses the lowest free number, which is this one
            os.set_inheritable(descriptor, True)
        if descriptor:
            stream = open_output(descriptor, is_result=descriptor == 1)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


@contextlib.contextmanager
def diverted(log: Path | str = os.devnull) -> Iterator[None]:
    """Redirects the output of Python and C++ to a file inside the `with` block.

    A notebook's `sys.stdout` is not a file, and a logger keeps the stream that exists at the
    logger's creation. Therefore `sys.stdout` and `sys.stderr` are set to the process's original
    streams, and descriptors 1 and 2 are redirected to the file.

    Args:
        log: The file to append to; by default, the output is dropped.
    """
    out, err = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
    kept = [(os.dup(descriptor), descriptor) for descriptor in (1, 2)]
    try:
        out.flush()  # standard error is never kept back: its buffer ends with each line
        redirect(log, 1, 2)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    finally:
        out.flush()
        for copy, descriptor in kept:
            os.dup2(copy, descriptor)
            os.close(copy)
