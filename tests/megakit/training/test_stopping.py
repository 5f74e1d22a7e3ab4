"""Signals while training: one is a request, a second one an order."""

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megakit.runtime.signals import STOP_SIGNALS

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def trainer() -> Any:
    return SimpleNamespace(
        global_step=5, world_size=1, _signal_connector=SimpleNamespace(received_sigterm=True)
    )


def stopper(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    from megakit.training.callbacks import StopOnSignal

    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    return StopOnSignal(None), raised  # type: ignore[arg-type]


def test_the_handlers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, _ = stopper(monkeypatch)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop.setup(trainer(), None, "fit")
    stop.on_train_start(trainer(), None)
    assert all(signal.getsignal(number) == stop._receive for number in STOP_SIGNALS)
    stop.teardown(trainer(), None, "fit")
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


def test_a_second_signal_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    stop, raised = stopper(monkeypatch)
    before = signal.getsignal(signal.SIGTERM)
    try:
        stop._receive(signal.SIGTERM, None)
        clock.now += 1
        stop._receive(signal.SIGTERM, None)
        assert raised == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGTERM, 0.1), (signal.SIGHUP, 5)])
def test_a_signal_that_comes_twice_may_be_one(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, number: int, seconds: float
) -> None:
    """`timeout` and `scancel` signal every process of a job, and the launching one hands it on.

    A lost terminal's signal, which shell and kernel send, is never an order to end at once.
    """
    stop, raised = stopper(monkeypatch)
    for _ in range(3):
        stop._receive(number, None)
        clock.now += seconds
    assert raised == []
    assert stop.request.received == number


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_stays_ignored(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """`nohup` ignores SIGHUP; a script's shell ignores SIGINT in what it starts by `&`."""
    stop, _ = stopper(monkeypatch)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        stop.setup(trainer(), None, "fit")
        stop.on_train_start(trainer(), None)
        assert signal.getsignal(number) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == stop._receive
        stop.teardown(trainer(), None, "fit")
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
