"""Standard streams that are closed, broken or lost, in real processes."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.scripts import REPOSITORY

PRELUDE = """
import os, sys
from pathlib import Path
from megakit.reporting.console import Console
from megakit.reporting.streams import secure_streams
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


@pytest.mark.parametrize("is_all_gone", [True, False])
def test_a_reader_that_is_gone_ends_nothing_and_the_log_has_the_rest(tmp_path, is_all_gone):
    descriptor, log = closed_pipe(), tmp_path / "log.txt"
    code = """
        log = Path(sys.argv[1])
        console = Console()
        console.fall_back_to(log); console.divert(log)
        print("print, out"); print("print, err", file=sys.stderr)
        console.is_terminal = True
        progress = console.progress("pretrain", 2)
        progress.update(2, {"loss": 0.5})
        progress.close()
        console.error("an error")
        console.result(Path("the/result"))
        """
    both = {"stderr": descriptor} if is_all_gone else {}
    done = run(code, log, stdout=descriptor, **both)
    os.close(descriptor)
    assert done.returncode == 0
    lines = log.read_text()
    assert "the/result" in lines
    assert "print, out" in lines
    for line in ("an error", "2/2  loss 0.5000"):
        assert line in (lines if is_all_gone else done.stderr)
        assert (line in lines) == is_all_gone


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
