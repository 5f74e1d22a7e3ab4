"""The console as real processes show it: two streams, a log, progress on a terminal or off."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
from pathlib import Path

import pytest

from megakit.reporting.console import Console
from tests.scripts import REPOSITORY, run_python

# Progress is shown by a clock that stands still until a test moves it: `now.seconds += 1`.
PRELUDE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from megakit.reporting import console
from megakit.reporting.console import Console

now = SimpleNamespace(seconds=100.0)
console.time = SimpleNamespace(monotonic=lambda: now.seconds)
"""


def show(code, *arguments, **options):
    """Runs code with a console; returns what comes out on standard output and error."""
    done = run_python("-c", PRELUDE + textwrap.dedent(code), *arguments, **options)
    return done.output(), done.err


def show_on_terminal(code, columns=80, **environment):
    """The same with standard error on a terminal; returns what reaches that."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=follower,
        env=os.environ | {"TERM": "xterm"} | environment,
    )
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 4096):
            shown += chunk
    except OSError:  # Linux says so when the last process has closed the terminal
        pass
    os.close(leader)
    assert process.wait() == 0
    return shown.decode()


def test_people_and_results_have_a_stream_each():
    out, err = show(
        """
        console = Console()
        console.say("going on")
        console.result(Path("runs/predict/predictions.csv"))
        console.table({"accuracy": "97%", "time": "3 s:\\n1 of it waiting"})
        """
    )
    assert out == "runs/predict/predictions.csv\n"
    assert err == "going on\n  accuracy  97%\n  time      3 s:\n            1 of it waiting\n"


def test_a_silent_rank_says_nothing_but_errors():
    out, err = show(
        """
        console = Console(silent=True)
        console.say("hidden")
        console.result(Path("hidden"))
        console.table({"hidden": "too"})
        console.progress("hidden", 10).update(10, {})
        console.error("disk full")
        """
    )
    assert (out, err) == ("", "disk full\n")


def test_everything_of_others_goes_into_the_log(tmp_path):
    """The log of an earlier start is kept."""
    (tmp_path / "log.txt").write_text("earlier\n")
    code = """
        import os, subprocess
        console = Console()
        log = Path(sys.argv[1])
        print("before, out"); print("before, err", file=sys.stderr)
        console.divert(log)
        print("python, out", flush=True)
        print("python, err", file=sys.stderr, flush=True)
        os.write(1, b"C++, out\\n"); os.write(2, b"C++, err\\n")
        subprocess.run(["sh", "-c", "echo child, out; echo child, err >&2"])
        console.say("for people")
        console.result(Path("the/result"))
        """
    out, err = show(code, tmp_path / "log.txt")
    assert out == "before, out\nthe/result\n"
    assert err == "before, err\nfor people\n"
    assert (tmp_path / "log.txt").read_text().splitlines() == [
        *("earlier", "python, out", "python, err", "C++, out", "C++, err"),
        *("child, out", "child, err"),
    ]


class TestProgressElsewhere:
    def lines(self, body):
        _, err = show(f"progress = Console().progress('pretrain', {body}")
        return err.splitlines()

    def test_after_a_resumption_only_what_is_left(self):
        lines = self.lines(
            "100, 50)\nfor step in range(51, 101): progress.update(step, {'loss': 0.5})"
        )
        assert [line.split()[2] for line in lines] == [f"{n}/100" for n in (60, 70, 80, 90, 100)]
        for line in lines:
            assert re.search(r"^pretrain .* loss 0.5000  \d+ steps/s  \d+:\d\d left$", line)
            assert "\r" not in line
            assert "\x1b" not in line

    def test_speed_and_time_left_are_those_of_this_start(self):
        """2,000 steps took 1,000 seconds, and 100 steps are left."""
        (line,) = self.lines("7100, 5000)\nprogress.began -= 1000\nprogress.update(7000, {})")
        assert line.endswith("  2 steps/s  0:50 left")

    def test_slow_steps_show_a_sign_of_life(self):
        lines = self.lines(
            "1000)\nprogress.update(1, {})\nnow.seconds += 31\n"
            "progress.update(2, {})\nprogress.update(3, {})"
        )
        assert [line.split()[2] for line in lines] == ["2/1000"]


class TestProgressOnATerminal:
    def test_one_line_is_kept_up_to_date(self):
        shown = show_on_terminal(
            """
            progress = Console().progress("pretrain", 1000)
            for step in range(1, 1001):
                now.seconds += 1 / 64
                progress.update(step, {"loss": 0.5})
            progress.close()
            """
        )
        assert shown.count("\n") == 1
        assert shown.endswith("\n")
        assert shown.startswith("\rpretrain ")
        assert " 497/1000  loss 0.5000  64 steps/s  0:08 left" in shown
        assert "1000/1000  loss 0.5000  64 steps/s  0:00 left" in shown
        assert shown.count("\rpretrain") == 143  # every 0.1 s, which is after seven steps

    def test_what_is_said_meanwhile_has_a_line_of_its_own(self):
        shown = show_on_terminal(
            """
            console = Console()
            progress = console.progress("pretrain", 100)
            for step in (50, 60):
                now.seconds += 1
                progress.update(step, {})
                console.error("disk full")
            """
        )
        first, second, third, fourth, rest = shown.split("\r\n")
        assert " 50/100 " in first
        assert " 60/100 " in third
        assert (second, fourth, rest) == ("disk full", "disk full", "")

    @pytest.mark.parametrize("columns", [80, 30])
    def test_a_line_never_wraps(self, columns):
        shown = show_on_terminal(
            """
            progress = Console().progress("finetune", 2000)
            for step in range(0, 2001, 100):
                now.seconds += 1
                progress.update(step, {"loss": 0.5, "validation": 0.25})
            progress.close()
            """,
            columns,
        )
        lines = shown.removesuffix("\r\n").split("\r")[1:]
        assert len(lines) > 10
        assert max(map(len, lines)) < columns
        last = lines[-1].rstrip()
        if columns >= 80:
            assert re.search(r"━ 2000/2000  loss 0.5000  validation 0.2500  .*/s  0:00 left$", last)
        else:
            assert last.startswith("finetune 2000/2000  loss")


def test_where_standard_error_is_no_real_file(capsys):
    """As in a notebook, and in this very test."""
    console = Console()
    console.say("seen")
    console.result(Path("path"))
    assert capsys.readouterr() == ("path\n", "seen\n")
    assert not console.is_terminal


def test_text_that_the_terminal_cannot_show_is_no_error():
    _, err = show("Console().say('━ ü \\ud800')", LC_ALL="C")
    assert err == "━ ü ?\n"
