"""What a person sees while a script runs: on standard error, and one line on standard output."""

import io
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from megakit.reporting.streams import lasting_file, open_stream


class Console:
    """Writes for people to standard error and results to standard output.

    Frameworks write to both, from Python and from C++, so the two file descriptors themselves are
    led into the log file once there is one (`divert`), and this console keeps copies of the real
    ones. If a stream's reader is gone, the console writes to the log file instead (`streams`).

    Args:
        silent: Say nothing but errors; for all ranks but one.
    """

    def __init__(self, silent: bool = False) -> None:
        self.silent = silent
        self._err = _copy_of(sys.stderr, 2)
        self._out = _copy_of(sys.stdout, 1)
        # A dumb terminal, as in an editor, cannot go back to the start of a line.
        self.is_terminal = self._err.isatty() and not silent and os.environ.get("TERM") != "dumb"
        self._open_line = ""

    def divert(self, log: Path) -> None:
        """Leads everything that others write to standard output or error into a log file."""
        sys.stdout.flush()
        sys.stderr.flush()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)

    def fall_back_to(self, log: Path) -> None:
        """Sets the file that receives what is written after a stream's reader has gone."""
        for stream in (self._err, self._out, sys.stderr, sys.stdout):
            if file := lasting_file(stream):
                file.fall_back_to(log)

    def say(self, line: str) -> None:
        """One line for the user."""
        if not self.silent:
            self.error(line)

    def error(self, line: str) -> None:
        """One line that is shown even by a silent rank: an error."""
        self.end_line()
        print(line, file=self._err, flush=True)

    def replace_line(self, line: str) -> None:
        """On a terminal: a line in the place of the one that was last shown by this method."""
        # Spaces and not an escape sequence wipe out the rest, as notebooks know no other way.
        print(f"\r{line:<{len(self._open_line)}}", end="", file=self._err, flush=True)
        self._open_line = line

    def end_line(self) -> None:
        """Lets what comes next start on a line of its own."""
        if self._open_line:
            print(file=self._err, flush=True)
            self._open_line = ""

    @property
    def columns(self) -> int:
        """Width of the terminal."""
        try:
            return os.get_terminal_size(self._err.fileno()).columns or 80
        except OSError:
            return 80

    def result(self, path: Path) -> None:
        """The one line on standard output."""
        if not self.silent:
            print(path, file=self._out, flush=True)

    def table(self, rows: Mapping[str, str]) -> None:
        """A small table of names and values; a value may have several lines."""
        width = max(map(len, rows))
        for name, value in rows.items():
            first, *others = value.splitlines()
            self.say(f"  {name:<{width}}  {first}")
            for line in others:
                self.say(f"  {'':<{width}}  {line}")

    def progress(self, title: str, total: int, start: int = 0) -> "Progress":
        """A progress display for `total` steps, of which `start` are done."""
        return Progress(self, title, total, start)

    def __deepcopy__(self, memo: object) -> "Console":
        """NeMo copies a trainer's callbacks in order to record them; a console is the only one."""
        return self


class Progress:
    """One line that is kept up to date on a terminal, and a line now and then elsewhere.

    rich's would take 0.65 ms for each update, and this takes 0.01 ms: a training of small steps
    shows ten in a second.

    Args:
        console: Where it is shown.
        title: What is going on.
        total: Steps in all.
        start: Steps done before.
    """

    BAR = 20  # columns

    def __init__(self, console: Console, title: str, total: int, start: int = 0) -> None:
        self.console = console
        self.title = title
        self.total = total
        self.start = start
        self.began = self.shown_at = time.monotonic()
        self.shown_tenth = start * 10 // max(1, total)

    def update(self, step: int, values: Mapping[str, float | None]) -> None:
        """Shows the step and some values, if it is time to.

        Args:
            step: Steps done.
            values: Losses and the like, by name; None is left out.
        """
        if self.console.silent:
            return
        now = time.monotonic()
        tenth = step * 10 // max(1, self.total)
        if self.console.is_terminal:
            if now - self.shown_at < 0.1 and step < self.total:
                return
        elif tenth == self.shown_tenth and now - self.shown_at < 30:
            return
        self.shown_at, self.shown_tenth = now, tenth
        if self.console.is_terminal:
            # In the last column some terminals begin the next line already.
            width = self.console.columns - 1
            self.console.replace_line(self._line(step, now - self.began, values, width))
        else:
            self.console.say(self._line(step, now - self.began, values))

    def close(self) -> None:
        """Ends the line, so that others start on one of their own."""
        self.console.end_line()

    def _line(
        self,
        step: int,
        seconds: float,
        values: Mapping[str, float | None],
        width: int | None = None,
    ) -> str:
        """The line, in at most `width` columns: the bar gives way, then the words, then the end."""
        rate = (step - self.start) / seconds if seconds > 0 else 0.0
        left = (self.total - step) / rate if rate > 0 else 0.0
        shown = "".join(
            f"  {name} {value:.4f}" for name, value in values.items() if value is not None
        )
        rest = (
            f"{step:>{len(str(self.total))}}/{self.total}{shown}"
            f"  {rate:.0f} steps/s  {_clock(left)} left"
        )
        room = self.BAR if width is None else width - len(self.title) - len(rest) - 2
        if room < self.BAR // 2:
            rest = rest.replace(" steps/s", "/s")
            room += len(" steps/s") - len("/s")
        if room < self.BAR // 4:
            return f"{self.title} {rest}"[:width]
        bar = min(room, self.BAR)
        filled = bar * step // max(1, self.total)
        return f"{self.title} {'━' * filled}{'╌' * (bar - filled)} {rest}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _copy_of(stream: TextIO, descriptor: int) -> TextIO:
    """A stream of our own on the same file; on the stream itself where it is no real file."""
    try:
        own = os.dup(stream.fileno() if stream.fileno() == descriptor else descriptor)
    except (OSError, io.UnsupportedOperation):  # a notebook's or a test's stand-in
        return stream
    return open_stream(own, is_result=descriptor == 1)
