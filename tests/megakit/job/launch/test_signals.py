"""Signals to the launcher and its ranks."""

import os
import signal
import time

import pytest

from megakit.runtime.signals import STOP_SIGNALS, exit_status
from tests.megakit.job.launch.jobs import alive, job, wait_until


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signals_are_handed_on(tmp_path, number):
    """A signal to the launcher alone, as `kill` sends it, or a program that supervises it."""
    with job(tmp_path, 2, "sleep") as started:
        ranks = started.ranks()
        started.process.send_signal(number)
        assert started.end() == (exit_status(number), "")
        assert alive(ranks) == []
        assert started.signals() == {"signal-0": number.name, "signal-1": number.name}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_processes(tmp_path, number):
    """As a terminal sends SIGINT and SIGHUP to launcher and ranks alike."""
    with job(tmp_path, 2, "sleep") as started:
        ranks = started.ranks()
        os.killpg(started.process.pid, number)
        assert started.end() == (exit_status(number), "")
        assert alive(ranks) == []


def test_a_second_signal_ends_ranks_that_do_not_listen(tmp_path):
    code = "from megakit.runtime.signals import StopRequest\nStopRequest.SAME_REQUEST_SECONDS = 0\n"
    with job(tmp_path, 2, "goes on", code=code) as started:
        ranks = started.ranks()
        started.process.send_signal(signal.SIGTERM)
        wait_until(lambda: len(started.signals()) == 2)
        assert len(alive(ranks)) == 2
        started.process.send_signal(signal.SIGTERM)
        assert started.end() == (143, "")
        assert alive(ranks) == []


def test_what_is_ignored_at_the_start_stays_ignored(tmp_path):
    """As `nohup` starts a process."""

    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with job(tmp_path, 2, "sleep", before=ignore) as started:
        ranks = started.ranks()
        os.killpg(started.process.pid, signal.SIGHUP)
        time.sleep(0.3)
        assert len(alive(ranks)) == 2
        started.process.send_signal(signal.SIGTERM)
        assert started.end() == (143, "")
        assert started.signals() == {"signal-0": "SIGTERM", "signal-1": "SIGTERM"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_ranks_are_ready_for_it(tmp_path, number):
    """While they still import, the signal itself ends them: stopped as asked, not failed."""
    with job(tmp_path, 2, "bare") as started:
        ranks = started.ranks()
        started.process.send_signal(number)
        status, _ = started.end()
        assert status == exit_status(number)
        assert alive(ranks) == []
