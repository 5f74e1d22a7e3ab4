"""A GPU that cannot be used, and the signals of a process."""

import contextlib
import re
import signal
import time

import pytest

from megakit.runtime.signals import STOP_SIGNALS, StopRequest, handle_signals, handlers_restored
from tests.scripts import output_of


def test_a_gpu_that_cannot_be_used_is_passed_over_with_a_reason() -> None:
    """A driver is there (here: is said to be), yet torch finds no GPU that it can use."""
    told = output_of(
        "from megakit.errors import UserError\n"
        "from megakit.runtime import accelerator, find_accelerator\n"
        "accelerator._has_gpu_driver = lambda: True\n"
        "found = find_accelerator('auto', 'auto')\n"
        "print(found.name, found.remark)\n"
        "try:\n"
        "    find_accelerator('gpu', '32')\n"
        "except UserError as error:\n"
        "    print(error)\n",
        CUDA_VISIBLE_DEVICES="",
    )
    auto, gpu = told.splitlines()
    reason = r"this machine's GPU cannot compute with {} \(.*(NVIDIA|CUDA).*\)\."
    assert re.fullmatch(r"cpu The GPU is not used: " + reason.format("bf16-mixed"), auto)
    end = r" Use --accelerator cpu, or auto\."
    assert re.fullmatch("--accelerator gpu: " + reason.format("32") + end, gpu)


def test_which_signal_ends_a_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not of the same request; never SIGHUP, which comes several times."""
    INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    request = StopRequest()
    told = []
    for number, now in ((INT, 100.0), (TERM, 100.4), (HUP, 101.0), (INT, 101.0), (TERM, 102.0)):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        told.append(request.is_repeated(number))
        assert request.received == INT
    assert told == [False, False, False, True, True]


def test_handlers_are_restored_after_an_error_and_ignored_signals_stay_ignored() -> None:
    """A shell ignores SIGINT in what it starts by `&`, and `nohup` ignores SIGHUP."""
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with contextlib.suppress(ValueError), handlers_restored():
            handle_signals(lambda number, frame: None)
            assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            raise ValueError("inside")
        assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
    finally:
        signal.signal(signal.SIGHUP, hangup)
