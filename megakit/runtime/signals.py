"""Signals that stop a run, their exit statuses, and what helper processes do with them."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

#: Signals that end a run after the current step with a checkpoint, and the exit status of each.
EXIT_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGHUP: 129}
STOP_SIGNALS = tuple(EXIT_STATUS)


def exit_status(number: int) -> int:
    """Returns the exit status of a process that a signal stopped."""
    return EXIT_STATUS[signal.Signals(number)]


def reset_signals() -> None:
    """Lets a signal end this process at once, with its exit status, until training has begun.

    SIGHUP (`nohup`) and SIGINT (a background job of a script) stay ignored if the parent process
    ignores them. A parent process may also block signals, or ignore SIGCHLD, which loses the exit
    statuses of child processes.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    for number in {signal.SIGTERM, signal.SIGUSR1, *accepted_signals()}:
        signal.signal(number, lambda number, frame: os._exit(exit_status(number)))


def accepted_signals() -> list[signal.Signals]:
    """Returns the signals in `STOP_SIGNALS` that this process does not ignore."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def handle_signals(handler: Callable[[int, FrameType | None], Any]) -> dict[int, Any]:
    """Installs a handler for each of `accepted_signals`; returns the previous handlers."""
    return {number: signal.signal(number, handler) for number in accepted_signals()}


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """Restores the handlers of `STOP_SIGNALS` at the end of the block.

    Training that ends with an exception leaves its handlers installed. A script then ends, but in
    a notebook the next Ctrl-C would have no effect.
    """
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # a handler of C code
                signal.signal(number, handler)


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Blocks `STOP_SIGNALS` in this thread, and in the processes that it starts in the block.

    Such a process calls `ignore_signals`. Before this call, a signal would end it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignores `STOP_SIGNALS` in a helper process whose parent handles the signals."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends; call it directly after a fork.

    To the kernel, the parent is the thread that started this process.
    """
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call of prctl
        os._exit(1)


class StopRequest:
    """The first signal that asked this process to stop.

    Attributes:
        received: The first signal, or 0.
    """

    #: Signals within this time are one request: Ctrl-C, `timeout` and `scancel` signal each process
    #: of a job, and the launcher forwards its own signal.
    SAME_REQUEST_SECONDS = 0.5

    def __init__(self) -> None:
        self.received = 0
        self._received_at = 0.0

    def is_repeated(self, number: int) -> bool:
        """Records a signal; returns whether it is a second request, to end at once.

        SIGHUP is never a second request: the shell and the kernel send several for one closed
        terminal.
        """
        now = time.monotonic()
        if not self.received:
            self.received, self._received_at = number, now
            return False
        return number != signal.SIGHUP and now - self._received_at > self.SAME_REQUEST_SECONDS
