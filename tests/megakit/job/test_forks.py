"""Work in a fork: the signals that it receives, and its end."""

import signal
import subprocess
import sys

import pytest

from tests.megakit.job.test_launch import is_alive, wait_until
from tests.scripts import REPOSITORY, environment, run_python

FORK = """
import os, signal, sys, time
from megakit.job.launch import run_in_fork
from megakit.job.script import begin_script

begin_script()
run_in_fork(lambda: None)  # the next one hears signals all the same

def work():
    def stop(number, frame):
        os.write(1, f"{signal.Signals(number).name}\\n".encode())
        time.sleep(0.3)  # another one, if it comes, is written, too
        sys.exit(7)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    os.write(1, f"{os.getpid()}\\n".encode())
    for _ in range(600):
        time.sleep(0.05)

sys.exit(run_in_fork(work))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_receives_signals_and_ends_with_its_parent(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FORK],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=str(REPOSITORY)),
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(number)
        told = "SIGTERM\n" if number == signal.SIGTERM else ""
        assert process.communicate(timeout=60)[0] == told
        assert process.returncode == (7 if told else -number)
        wait_until(lambda: not is_alive(child), seconds=10)
    finally:
        process.kill()
        process.communicate()


STATUSES = """
import os, signal, sys
from megakit.job.launch import run_in_fork

print("once", end=" ")
print(*map(run_in_fork, [
    lambda: None,
    lambda: sys.exit(),
    lambda: sys.exit(5),
    lambda: sys.exit("a reason"),
    lambda: print("said by the fork", end=" "),
    lambda: 1 / 0,
    lambda: os.kill(os.getpid(), signal.SIGKILL),
]))
"""


def test_the_end_of_a_fork_is_reported_as_a_shell_does() -> None:
    done = run_python("-c", STATUSES, PYTHONUNBUFFERED="")
    assert done.out == "once said by the fork 0 0 5 1 0 1 137\n"
    assert done.err.count("ZeroDivisionError: ") == 1
