"""Prints messages and the progress bar to standard error, and one result to standard output."""

import contextlib
import io
import os
import sys
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TextIO

from megakit.reporting.streams import lasting_file, open_stream, redirect


class Console:
    """Prints messages to standard error, and results to standard output.

    Frameworks write to both streams, from Python and from C++. Therefore `divert` redirects the two
    file descriptors to the log file, and the console uses copies of the original descriptors. If a
    stream's reader is gone, the console writes to the log file instead (see `streams`).

    Args:
        silent: Whether to print only errors; true for all ranks but one.

    Attributes:
        is_diverted: Whether other code writes to the log file.
    """

    is_diverted = False

    def __init__(self, silent: bool = False) -> None:
        self.silent = silent
        self._err = _copy_of(sys.stderr, 2)
        self._out = _copy_of(sys.stdout, 1)
        # A dumb terminal, as in an editor, cannot return to the start of a line.
        self.is_terminal = self._err.isatty() and not silent and os.environ.get("TERM") != "dumb"
        self._open_line = ""

    def divert(self, log: Path) -> None:
        """Redirects what other code writes to standard output or error into a log file."""
        sys.stdout.flush()
        sys.stderr.flush()
        redirect(log, 1, 2)
        self.is_diverted = True

    def fall_back_to(self, log: Path) -> None:
        """Sets the file that receives the output after a stream's reader has gone."""
        for stream in (self._err, self._out, sys.stderr, sys.stdout):
            if file := lasting_file(stream):
                file.fall_back_to(log)

    def say(self, line: str) -> None:
        """Prints one line, unless this rank is silent."""
        if not self.silent:
            self.error(line)

    def error(self, line: str) -> None:
        """Prints one line, even on a silent rank."""
        self.end_line()
        print(line, file=self._err, flush=True)

    def replace_line(self, line: str) -> None:
        """Replaces the line that this method printed last; works on terminals only."""
        # Spaces overwrite the rest, because notebooks do not support the escape sequence.
        print(f"\r{line:<{len(self._open_line)}}", end="", file=self._err, flush=True)
        self._open_line = line

    def end_line(self) -> None:
        """Ends the replaced line, so that the next output starts on a new line."""
        if self._open_line:
            print(file=self._err, flush=True)
            self._open_line = ""

    @property
    def columns(self) -> int:
        """Returns the width of the terminal in columns; 80 if it is unknown."""
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self._err.fileno()).columns or 80
        return 80

    def result(self, path: Path) -> None:
        """Prints the result, the only line on standard output."""
        if not self.silent:
            print(path, file=self._out, flush=True)

    def table(self, rows: Mapping[str, str]) -> None:
        """Prints a table of names and values; a value may have several lines."""
        width = max(map(len, rows))
        for name, value in rows.items():
            first, *others = value.splitlines()
            self.say(f"  {name:<{width}}  {first}")
            for line in others:
                self.say(f"  {'':<{width}}  {line}")

    def progress(self, title: str, total: int, start: int = 0) -> "Progress":
        """Returns a progress display for `total` steps, of which `start` are done."""
        return Progress(self, title, total, start)

    def __deepcopy__(self, memo: object) -> "Console":
        """Returns the console itself: NeMo copies a trainer's callbacks to record them."""
        return self


class Progress:
    """Shows progress: one updated line on a terminal, an occasional new line elsewhere.

    An update takes 0.01 ms, compared with 0.65 ms for the library rich.
    """

    BAR = 20  # columns

    def __init__(self, console: Console, title: str, total: int, start: int = 0) -> None:
        self.console, self.title, self.total, self.start = console, title, total, start
        self.began = self.shown_at = time.monotonic()
        self.shown_tenth = start * 10 // max(1, total)

    def update(self, step: int, values: Mapping[str, float | None]) -> None:
        """Shows the number of completed steps and values by name, if an update is due."""
        console = self.console
        seconds = time.monotonic() - self.shown_at
        tenth = step * 10 // max(1, self.total)
        if console.is_terminal:
            is_due = seconds >= 0.1 or step >= self.total
        else:
            is_due = tenth != self.shown_tenth or seconds >= 30
        if console.silent or not is_due:
            return
        self.shown_at, self.shown_tenth = self.shown_at + seconds, tenth
        if console.is_terminal:
            # Some terminals start a new line when the last column is written.
            console.replace_line(self._line(step, values, console.columns - 1))
        else:
            console.say(self._line(step, values, sys.maxsize))

    def close(self) -> None:
        """Ends the line, so that the next output starts on a new line."""
        self.console.end_line()

    def _line(self, step: int, values: Mapping[str, float | None], width: int) -> str:
        """Returns the line; if the width is too small, with a short unit, less bar, fewer values.

        Count, speed and time left come first: without room for a bar, the line has nothing else.
        """
        rate = (step - self.start) / max(self.shown_at - self.began, 1e-9)
        left = _clock((self.total - step) / rate if rate > 0 else 0.0)
        shown = [f"{name} {value:.4f}" for name, value in values.items() if value is not None]
        count = f"{step:>{len(str(self.total))}}/{self.total}"
        units = (" steps/s", self.BAR // 2), ("/s", self.BAR // 4)
        for number, (unit, least) in product(range(len(shown), -1, -1), units):
            rest = "  ".join([count, *shown[:number], f"{rate:.0f}{unit}", f"{left} left"])
            room = min(self.BAR, width - len(self.title) - len(rest) - 2)
            if room >= least:
                filled = room * step // max(1, self.total)
                return f"{self.title} {'━' * filled}{'╌' * (room - filled)} {rest}"
        return rest[:width]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _copy_of(stream: TextIO, descriptor: int) -> TextIO:
    """Returns a new stream on a copy of the descriptor; the stream itself if it is not a file."""
    try:
        own = os.dup(stream.fileno() if stream.fileno() == descriptor else descriptor)
    except (OSError, io.UnsupportedOperation):  # a notebook's or a test's stream
        return stream
    return open_stream(own, is_result=descriptor == 1)
