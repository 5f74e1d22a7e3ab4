"""The console as real processes show it: two streams, a log, progress, and a reader that goes."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap

import pytest

from tests.scripts import REPOSITORY, run_python

# Progress is shown by a clock that stands still until a test moves it: `now.seconds += 1`.
PRELUDE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from megakit.job import console
from megakit.job.console import Console
from megakit.job.console import Output
from megakit.job.script import begin_script

begin_script()
now = SimpleNamespace(seconds=100.0)
console.time = SimpleNamespace(monotonic=lambda: now.seconds)
"""


def show(code, *arguments, **options):
    """Runs code with a console; returns what comes out on standard output and error."""
    done = run_python("-c", PRELUDE + textwrap.dedent(code), *arguments, **options)
    return done.output(), done.err


def start_on_terminal(code, *arguments, columns=80):
    """Starts the same with standard error on a terminal; returns the process and that."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *arguments],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stderr=follower,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(follower)
    return process, leader


def test_people_and_results_have_a_stream_each_and_a_silent_rank_neither():
    out, err = show(
        """
        for console in (Console(), Console(silent=True)):
            console.say("going on ━ \\ud800")
            console.result(Path("runs/predict/predictions.csv"))
            console.table({"accuracy": "97%", "time": "3 s:\\n1 of it waiting"})
            console.progress("hidden", 10).update(0, {})
        console.error("disk full")
        """,
        LC_ALL="C",
    )
    assert out == "runs/predict/predictions.csv\n"
    assert err == (
        "going on ━ ?\n  accuracy  97%\n  time      3 s:\n            1 of it waiting\ndisk full\n"
    )


@pytest.mark.parametrize(
    ("body", "steps", "end"),
    [
        # After a resumption, a line for each tenth of all steps that is left.
        (
            "100, 80)\n"
            "for n in range(81, 101): now.seconds += 1; progress.update(n, {'loss': 0.5})",
            ["90/100", "100/100"],
            "loss 0.5000  1 steps/s",
        ),
        # This start did 2,000 steps in 1,000 seconds, and 100 steps are left.
        (
            "7100, 5000)\nnow.seconds += 1000\nprogress.update(7000, {})",
            ["7000/7100"],
            "7000/7100  2 steps/s  0:50 left",
        ),
        # Every 30 seconds: this start did 30 steps.
        (
            "5010, 0)\nnow.seconds += 30\nprogress.update(30, {})",
            ["30/5010"],
            "30/5010  1 steps/s  1:23:00 left",
        ),
    ],
)
def test_progress_without_a_terminal(body, steps, end):
    _, err = show(f"progress = Console().progress('pretrain', {body}")
    lines = err.splitlines()
    assert [line.split()[2] for line in lines] == steps
    assert all(re.search(r"  \d+ steps/s  [\d:]+ left$", line) for line in lines)
    assert all(end in line for line in lines)
    assert "\r" not in err


@pytest.mark.parametrize(
    ("columns", "last"),
    [
        (120, r"━{20} 2000/2000  loss 0.5000 .* val_accuracy 0.9000  64 steps/s  0:00 left$"),
        (50, r"^finetune ━{20} 2000/2000  64 steps$"),
    ],
)
def test_a_line_on_a_terminal_is_kept_up_to_date_and_never_wraps(columns, last):
    process, terminal = start_on_terminal(
        """
        console = Console()
        progress = console.progress("finetune", 2000)
        for step in range(2001):
            now.seconds += 1 / 64
            progress.update(step, {"loss": 0.5, "validation": 0.25, "val_accuracy": 0.9})
        console.error("disk full")
        """,
        columns=columns,
    )
    shown = b""
    with contextlib.suppress(OSError):  # so Linux says that the process has closed the terminal
        while chunk := os.read(terminal, 4096):
            shown += chunk
    os.close(terminal)
    process.communicate()
    assert process.returncode == 0
    whole, error, rest = shown.decode().split("\r\n")
    lines = whole.split("\r")[1:]
    assert len(lines) == 286  # every 0.1 s, which is after seven steps
    assert max(map(len, lines)) < columns
    assert re.search(last, lines[-1].rstrip())
    assert (error, rest) == ("disk full", "")  # on a line of its own


def test_a_reader_that_is_gone_ends_nothing_and_the_log_has_the_rest(tmp_path):
    """Each line once, after an earlier start's; what was printed before it is known is lost."""
    reading, writing = os.pipe()
    os.close(reading)
    log = tmp_path / "log.txt"
    log.write_text("earlier\n")
    code = """
        import os, subprocess
        log = Path(sys.argv[1])
        console = Console()
        console.say("early")
        Output.log = log
        print("print, out"); print("print, err", file=sys.stderr)  # as with --verbose
        console.divert(log)
        os.write(1, b"C++, out\\n"); os.write(2, b"C++, err\\n")
        subprocess.run(["sh", "-c", "echo child, out; echo child, err >&2"])
        console.progress("pretrain", 2).update(2, {"loss": 0.5})
        console.error("an error\\n" * 2000 + "end")
        console.result(Path("the/result"))
        """
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), str(log)],
        cwd=REPOSITORY,
        stdout=writing,
        stderr=writing,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 0
    earlier, *lines = log.read_text().splitlines()
    assert earlier == "earlier"
    others = ["print, out", "print, err", "C++, out", "C++, err", "child, out", "child, err"]
    assert lines[:6] == others
    assert "2/2  loss 0.5000" in lines[6]
    assert lines[7:] == ["an error"] * 2000 + ["end", "the/result"]


def test_a_terminal_that_is_lost(tmp_path):
    """The log gets whole lines of progress, as a file does, and none that replaces another."""
    code = """
        console = Console()
        Output.log = Path(sys.argv[1])
        progress = console.progress("pretrain", 3)
        progress.update(1, {})
        now.seconds += 1
        progress.update(1, {})
        sys.stdin.readline()
        for step in (2, 3):
            now.seconds += 1
            progress.update(step, {})
        console.say("done")
        """
    process, terminal = start_on_terminal(code, tmp_path / "log.txt")
    while b"1/3" not in os.read(terminal, 4096):
        pass
    os.close(terminal)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
    empty, two, three, done = (tmp_path / "log.txt").read_bytes().split(b"\n")[:-1]
    assert (empty, done) == (b"", b"done")
    assert b"2/3" in two
    assert b"3/3" in three
    assert b"\r" not in two + three
