"""Prints messages and the progress bar to standard error, and one result to standard output."""

import contextlib
import errno
import faulthandler
import io
import os
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TextIO


class Output(io.FileIO):
    """Writes to a descriptor; once its reader is gone, to the log.

    Attributes:
        log: The log file of this process. Until it is known, output without a reader is lost.
    """

    log: ClassVar[Path | None] = None

    def write(self, data: Any) -> int:
        """Writes to the descriptor or the log."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # a closed pipe, a lost terminal
                error.filename = Path(f"/proc/self/fd/{self.fileno()}").readlink()
                raise
        if self.log is None:
            return len(data)
        # Replaces the descriptor itself, because C++ libraries write to it as well.
        redirect(self.log, self.fileno())
        return super().write(data)


def open_output(descriptor: int) -> TextIO:
    """Opens a text stream on a descriptor; see `Output`."""
    buffer = io.BufferedWriter(Output(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffer, "utf-8", "replace", line_buffering=True)


def redirect(path: Path | str, *descriptors: int) -> None:
    """Lets descriptors append to a file."""
    with Path(path).open("ab") as file:
        for descriptor in descriptors:
            os.dup2(file.fileno(), descriptor)


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


class Console:
    """Prints messages to standard error, and results to standard output.

    Frameworks write to both streams, from Python and from C++. Therefore `divert` redirects the two
    file descriptors to the log file, and the console uses copies of the original descriptors. If a
    stream's reader is gone, the console writes to the log file instead.

    Args:
        silent: Whether to print only errors; true for all ranks but one.

    Attributes:
        is_diverted: Whether other code writes to the log file.
    """

    is_diverted = False

    def __init__(self, silent: bool = False) -> None:
        self.silent = silent
        self._err = open_output(os.dup(2))
        self._out = open_output(os.dup(1))
        self._open_line = ""

    def divert(self, log: Path) -> None:
        """Redirects what other code writes to standard output or error into a log file."""
        redirect(log, 1, 2)
        self.is_diverted = True
        faulthandler.enable(self._err, all_threads=False)  # if the process is aborted

    def say(self, line: str) -> None:
        """Prints one line, unless this rank is silent."""
        if not self.silent:
            self.error(line)

    def error(self, line: str) -> None:
        """Prints one line, even on a silent rank."""
        if self._open_line:
            self._open_line, line = "", f"\n{line}"
        with contextlib.suppress(OSError):  # of a file on a full disk, which costs no step
            print(line, file=self._err, flush=True)

    def replace_line(self, line: str) -> None:
        """Replaces the line that this method printed last, until `error` ends the line."""
        # Spaces overwrite the rest, because notebooks do not support the escape sequence.
        print(f"\r{line:<{len(self._open_line)}}", end="", file=self._err, flush=True)
        self._open_line = line

    @property
    def columns(self) -> int:
        """The width of the terminal; 0 where a line cannot be replaced, such as in a file."""
        with contextlib.suppress(OSError):  # of what is no terminal, or has gone
            return os.get_terminal_size(self._err.fileno()).columns or 80
        return 0

    def result(self, path: Path) -> None:
        """Prints the result, the only line on standard output."""
        if not self.silent:
            print(path, file=self._out, flush=True)

    def table(self, rows: Mapping[str, str]) -> None:
        """Prints a table of names and values; a value may have several lines."""
        width = max(map(len, rows))
        for name, value in rows.items():
            self.say(f"  {name:<{width}}  {value}".replace("\n", "\n" + " " * (width + 4)))

    def progress(self, title: str, total: int, start: int = 0) -> "Progress":
        """Returns a progress display for `total` steps, of which `start` are done."""
        return Progress(self, title, total, start)

    def __deepcopy__(self, memo: object) -> "Console":
        """Returns the console itself: NeMo copies a trainer's callbacks to record them."""
        return self


class Progress:
    """Shows progress: one updated line on a terminal, elsewhere a new line for each tenth."""

    BAR = 20  # columns

    def __init__(self, console: Console, title: str, total: int, start: int = 0) -> None:
        self.console, self.title, self.total, self.start = console, title, total, start
        self.began = self.shown_at = time.monotonic()
        self.shown_tenth = start * 10 // max(1, total)

    def update(self, step: int, values: Mapping[str, float | None]) -> None:
        """Shows the number of completed steps and values by name, if an update is due."""
        console, columns = self.console, self.console.columns
        seconds = time.monotonic() - self.shown_at
        tenth = step * 10 // max(1, self.total)
        is_due = seconds >= (0.1 if columns else 30) or step >= self.total
        is_due = is_due or not (columns or tenth == self.shown_tenth)
        if console.silent or not is_due:
            return
        self.shown_at, self.shown_tenth = self.shown_at + seconds, tenth
        # Some terminals start a new line when the last column is written.
        line = self._line(step, values, (columns or sys.maxsize) - 1)
        (console.replace_line if columns else console.say)(line)

    def _line(self, step: int, values: Mapping[str, float | None], width: int) -> str:
        """Returns the line; the last values are left out if they do not fit."""
        pace = max(self.shown_at - self.began, 1e-9) / max(1, step - self.start)  # seconds
        left = str(timedelta(seconds=round((self.total - step) * pace))).removeprefix("0:0")
        shown = [f"{name} {value:.4f}" for name, value in values.items() if value is not None]
        filled = self.BAR * step // max(1, self.total)
        bar = "━" * filled + "╌" * (self.BAR - filled)
        count = f"{self.title} {bar} {step:>{len(str(self.total))}}/{self.total}"
        while True:
            line = "  ".join([count, *shown, f"{1 / pace:.0f} steps/s", f"{left} left"])
            if len(line) <= width or not shown:
                return line[:width]
            shown.pop()
