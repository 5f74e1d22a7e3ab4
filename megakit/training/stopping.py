"""Stops a training: after a signal, on all ranks after one step; or if a gradient is NaN."""

import contextlib
import math
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import distributed

from megakit.data.device import copied
from megakit.runtime.signals import StopRequest, handle_signals


class StopSignals(contextlib.AbstractContextManager["StopSignals"]):
    """Handles stop signals inside a `with` block.

    A second signal ends the process at once; complete checkpoints are not changed.

    Args:
        say: Prints a line for the user.
    """

    #: The largest number of steps between two agreements of several ranks on whether to stop. The
    #: ranks agree about once a second, more often because of this limit, and after each validation.
    AGREE_AT_MOST_EVERY = 32

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        self.request, self.told = StopRequest(), False
        self.agree_at = 0  # a step
        self._before: dict[int, Any] = {}
        self._agreed: tuple[int, float] | None = None  # step and time of the last agreement

    def __enter__(self) -> "StopSignals":
        """Installs the signal handlers."""
        self._before = handle_signals(self._receive) | self._before
        return self

    def __exit__(self, *exception: object) -> None:
        """Restores the previous signal handlers."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.request.is_repeated(number):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self.told:
            self.told = True  # without a call since the test: a next signal interrupts calls only
            with contextlib.suppress(RuntimeError):  # the signal came while a line was written
                self.say(
                    "Stopping: a checkpoint will be saved. A second signal ends the run at once."
                )

    def received(self, step: int) -> int:
        """Returns the signal that any rank received before this step, or 0; all ranks call it."""
        if distributed.get_world_size() == 1:
            return self.request.received
        now = time.monotonic()
        if step < self.agree_at:
            return 0
        agreed_step, agreed_at = self._agreed or (step, now)
        values = torch.tensor([self.request.received, now - agreed_at])
        # On a CPU, megakit's patch returns its device.
        message = copied(values, torch.device(torch.cuda.current_device()))
        distributed.all_reduce(message, distributed.ReduceOp.MAX)
        number, seconds = message.tolist()
        steps_in_a_second = int((step - agreed_step) / max(seconds, 1e-9))
        self.agree_at = step + max(1, min(self.AGREE_AT_MOST_EVERY, steps_in_a_second))
        self._agreed = step, now
        return int(number)


def check_norm(step: int, norm: float | None) -> None:
    """Refuses a gradient's norm that is NaN or infinite.

    Args:
        step: The step of the gradient, from 1.
        norm: The norm before clipping; None if it was not computed.

    Raises:
        RuntimeError: The norm is NaN or infinite.
    """
    if norm is not None and not math.isfinite(norm):
        raise RuntimeError(
            f"Step {step}: the gradient's norm is {norm}. Earlier checkpoints are not changed. "
            "Check the loss and the data for NaN, or use a lower --lr."
        )
