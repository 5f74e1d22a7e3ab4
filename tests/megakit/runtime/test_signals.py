"""The signal state that a script gives itself, whatever its parent process left."""

import contextlib
import signal
import subprocess
import sys
import time

import pytest

from megakit.runtime.signals import (
    EXIT_STATUS,
    STOP_SIGNALS,
    StopRequest,
    exit_status,
    handle_signals,
    handlers_restored,
)
from tests.scripts import REPOSITORY, environment

SHOW = """
import time
from megakit.job.script import begin_script
begin_script()
print("begun", flush=True)
for _ in range(600):  # one long sleep may begin just after a signal, and delays its handler
    time.sleep(0.05)
"""


def begin(before=None):
    """Starts a script in the given signal state; returns it once it has begun."""
    process = subprocess.Popen(
        [sys.executable, "-c", SHOW],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
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
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_before_training_a_signal_ends_the_process_with_its_status(number):
    process = begin()
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == EXIT_STATUS[number]


def test_what_a_parent_process_ignores_on_purpose_stays_ignored():
    """SIGHUP by `nohup`, SIGINT by a shell's `&`; SIGTERM and SIGUSR1 mean a scheduler's stop."""
    process = begin(ignore_all)
    for number in (signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_handlers_are_restored_after_an_error() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with contextlib.suppress(ValueError), handlers_restored():
        handle_signals(lambda number, frame: None)
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
        raise ValueError("inside")
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
