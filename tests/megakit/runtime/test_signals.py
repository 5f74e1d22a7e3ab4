"""The signal state that a script gives itself, whatever its parent process left."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from megakit.runtime.signals import (
    EXIT_STATUS,
    STOP_SIGNALS,
    StopRequest,
    die_with_parent,
    exit_status,
    handle_signals,
    handlers_restored,
)
from tests.scripts import REPOSITORY, environment

SHOW = """
import os, signal, sys, time
from megakit.job.script import begin_script
begin_script()
def pause():
    for _ in range(600):  # one long sleep may begin just after a signal, and delays its handler
        time.sleep(0.05)
print("begun", flush=True)
"""


def begin(code, before):
    """Starts a script in the given signal state; returns it once it has begun."""
    process = subprocess.Popen(
        [sys.executable, "-c", SHOW + code],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
        restore_signals=False,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n", process.communicate(timeout=60)
    return process


def test_statuses():
    assert {signal.Signals(number).name: exit_status(number) for number in STOP_SIGNALS} == {
        "SIGINT": 130,
        "SIGTERM": 143,
        "SIGUSR1": 143,
        "SIGHUP": 129,
    }
    assert {number: 128 + number for number in STOP_SIGNALS if number != signal.SIGUSR1} == {
        number: status for number, status in EXIT_STATUS.items() if number != signal.SIGUSR1
    }


def test_which_signal_ends_a_process_at_once(monkeypatch):
    """One that is not of the same request; never SIGHUP, which comes several times."""
    INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    request = StopRequest()
    assert request.received == 0
    told = []
    for number, now in ((INT, 100.0), (TERM, 100.4), (HUP, 101.0), (INT, 101.0), (TERM, 102.0)):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        told.append(request.is_repeated(number))
        assert request.received == INT
    assert told == [False, False, False, True, True]


def ignore_all():
    for number in (*STOP_SIGNALS, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


def block_all():
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())


@pytest.mark.parametrize("before", [block_all, None])
@pytest.mark.parametrize("number", [n for n in STOP_SIGNALS if n != signal.SIGINT])
def test_before_training_a_signal_ends_the_process_with_its_status(number, before):
    process = begin("pause()", before)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == EXIT_STATUS[number]


def test_a_blocked_sigint_is_heard():
    process = begin("pause()", block_all)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert process.returncode == -signal.SIGINT


def test_what_the_program_relies_on_is_not_left_blocked():
    process = begin("print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))", block_all)
    blocked = set(map(int, process.stdout.read().split()))
    assert process.wait(timeout=60) == 0
    assert not blocked & {*STOP_SIGNALS, signal.SIGCHLD}


def test_a_process_whose_parent_has_ended_meanwhile_ends_too():
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            die_with_parent(os.getpid())  # not its parent
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_what_a_parent_process_ignores_on_purpose_stays_ignored():
    """SIGHUP by `nohup`, SIGINT by a shell's `&`; SIGTERM and SIGUSR1 mean a scheduler's stop."""
    process = begin("pause()", ignore_all)
    for number in (signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_children_are_waited_for_where_the_parent_process_ignores_sigchld():
    code = "import subprocess; print(subprocess.run(['sh', '-c', 'exit 7']).returncode)"
    process = begin(code, ignore_all)
    assert process.stdout.read() == "7\n"  # not `communicate`: a part may have been read ahead
    assert process.communicate(timeout=60)[1] == ""


def test_handlers_are_restored_after_an_error() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with contextlib.suppress(ValueError), handlers_restored():
        handle_signals(lambda number, frame: None)
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
        raise ValueError("inside")
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
