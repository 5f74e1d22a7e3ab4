"""Work in a fork: the signals that it receives, and its end."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from contextlib import contextmanager

import pytest

from tests.megakit.job.jobs import is_alive, wait_until
from tests.scripts import REPOSITORY, environment

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


@contextmanager
def fork(**options):
    """A process that works in a fork of its own; yields it and the id of the fork."""
    process = subprocess.Popen(
        [sys.executable, "-c", FORK],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=str(REPOSITORY)),
        start_new_session=True,
        **options,
    )
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_fork_receives_signals(number):
    with fork() as (process, _):
        process.send_signal(number)
        assert process.communicate(timeout=60)[0] == f"{number.name}\n"
        assert process.returncode == 7


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


def test_the_end_of_a_fork_is_reported_as_a_shell_does():
    done = subprocess.run(
        [sys.executable, "-c", STATUSES],
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=str(REPOSITORY), PYTHONUNBUFFERED=""),
        timeout=60,
        check=True,
    )
    assert done.stdout == "once said by the fork 0 0 5 1 0 1 137\n"
    assert done.stderr.count("ZeroDivisionError: ") == 1


def test_a_fork_ends_with_its_parent():
    with fork() as (process, child):
        process.kill()
        wait_until(lambda: not is_alive(child), seconds=10)


@pytest.mark.parametrize(("key", "name"), [(b"\x03", "SIGINT"), (b"", "SIGHUP")])
def test_a_terminal_s_signal_reaches_the_fork_once(key, name):
    """Ctrl-C signals both processes, a lost terminal the first one of the session alone."""
    leader, follower = pty.openpty()

    def control():
        fcntl.ioctl(follower, termios.TIOCSCTTY, 0)

    with fork(preexec_fn=control, stdin=follower, pass_fds=[follower]) as (process, _):
        os.close(follower)
        os.write(leader, key)
        if not key:
            os.close(leader)
        assert process.communicate(timeout=60)[0] == f"{name}\n"
        assert process.returncode == 7
