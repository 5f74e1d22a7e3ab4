"""Standard streams that are closed, broken or lost, in real processes."""

import os
import pty
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.scripts import REPOSITORY

PRELUDE = """
import os, sys
from pathlib import Path
from megakit.job.console import Console
from megakit.job.streams import secure_streams
secure_streams()
"""


def run(code, *arguments, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *map(str, arguments)],
        cwd=REPOSITORY,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def closed_pipe():
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def test_a_reader_that_is_gone_ends_nothing_and_the_log_has_the_rest(tmp_path):
    """Each line once; what was printed before the log is known is lost."""
    descriptor, log = closed_pipe(), tmp_path / "log.txt"
    code = """
        log = Path(sys.argv[1])
        console = Console()
        console.say("early")
        console.fall_back_to(log)
        print("print, out"); print("print, err", file=sys.stderr)  # as with --verbose
        console.divert(log)
        os.write(1, b"C++, out\\n"); os.write(2, b"C++, err\\n")
        console.progress("pretrain", 2).update(2, {"loss": 0.5})
        console.error("an error\\n" * 2000 + "end")
        console.result(Path("the/result"))
        """
    done = run(code, log, stdout=descriptor, stderr=descriptor)
    os.close(descriptor)
    assert done.returncode == 0
    lines = log.read_text().splitlines()
    assert lines[:4] == ["print, out", "print, err", "C++, out", "C++, err"]
    assert "2/2  loss 0.5000" in lines[4]
    assert lines[5:] == ["an error"] * 2000 + ["end", "the/result"]


def test_a_terminal_that_is_lost(tmp_path):
    """The log gets whole lines of progress, as a file does, and none that replaces another."""
    leader, follower = pty.openpty()
    code = """
        console = Console()
        console.fall_back_to(Path(sys.argv[1]))
        progress = console.progress("pretrain", 3)
        progress.began = progress.shown_at = 0
        progress.update(1, {})
        sys.stdin.readline()
        for step in (2, 3):
            progress.shown_at = 0
            progress.update(step, {})
        console.say("done")
        """
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), str(tmp_path / "log.txt")],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stderr=follower,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(follower)
    while b"1/3" not in os.read(leader, 4096):
        pass
    os.close(leader)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
    empty, two, three, done = (tmp_path / "log.txt").read_bytes().split(b"\n")[:-1]
    assert (empty, done) == (b"", b"done")
    assert b"2/3" in two
    assert b"3/3" in three
    assert b"\r" not in two + three


def test_a_stream_that_is_closed_at_the_start_is_no_file_of_the_run(tmp_path):
    """Else the next opened file, such as a checkpoint, receives the messages."""
    code = f"""
        file = open({str(tmp_path / "checkpoint")!r}, "w")
        print("out"); print("err", file=sys.stderr)
        Console().say("said"); Console().result(Path("path"))
        import subprocess
        subprocess.run(["sh", "-c", "echo child; echo child >&2; cat"], check=True)
        assert file.fileno() > 2
        """
    done = run(code, stdin=None, stdout=None, stderr=None, preexec_fn=lambda: os.closerange(0, 3))
    assert done.returncode == 0
    assert (tmp_path / "checkpoint").read_text() == ""


def test_the_exit_adds_nothing():
    """Python's own flush at the exit makes status 120, and says 'Exception ignored'."""
    descriptor = closed_pipe()
    done = run("print('err', file=sys.stderr); print('out')", stdout=descriptor)
    os.close(descriptor)
    assert done.returncode == 0
    assert "Exception" not in done.stderr


def test_a_result_that_meets_a_full_disk_is_an_error_and_a_message_is_not():
    with Path("/dev/full").open("w") as full:
        assert run("Console().say('hello')", stderr=full).returncode == 0
        done = run("Console().result(Path('path'))", stdout=full)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
