"""The message about a process that C++ code has aborted."""

import signal
from pathlib import Path

import pytest

from tests.scripts import Result, run_python

PROGRAM = """
import ctypes, os, sys, time
from pathlib import Path
from megakit.job.aborts import report_abort
from megakit.reporting.console import Console

console = Console(silent=True)
console.divert(Path(sys.argv[1]))
report_abort(console, "It's aborted: $HOME %s.")

def wait_for_another_rank():
    {end}
    time.sleep(20)

wait_for_another_rank()
"""
#: As torch's watchdog does: in a thread that Python does not know.
ABORT = "libc = ctypes.CDLL(None)\n    "
ABORT += "libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.abort, None)"


def end(how: str, log: Path) -> Result:
    """Runs the program to its end, and until nothing writes to its standard error any more."""
    return run_python("-c", PROGRAM.replace("{end}", how), log, timeout=60)


def test_an_abort_in_a_thread_of_a_library(tmp_path: Path) -> None:
    done = end(ABORT, tmp_path / "log")
    assert done.status == -signal.SIGABRT
    assert done.err == "It's aborted: $HOME %s.\n"
    log = (tmp_path / "log").read_text()
    assert log.startswith("Fatal Python error: Aborted\n")
    assert "in wait_for_another_rank" in log


@pytest.mark.parametrize(
    "how",
    ["os._exit(0)", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 15)", "sys.exit()"],
)
def test_other_ends_say_nothing(how: str, tmp_path: Path) -> None:
    assert end(how, tmp_path / "log").err == ""
    assert (tmp_path / "log").read_text() == ""
