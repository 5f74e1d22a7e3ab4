"""Provides callbacks that check options, find the best value, and stop training."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping

from megakit.data.device import copied
from megakit.errors import Stopped, UserError
from megakit.nemo.validation import higher_is_better
from megakit.nemo.writer import CheckpointWriter, logged_values
from megakit.runtime.signals import StopRequest, handle_signals


class BestValue(EarlyStopping):
    """Checks the column that `--best-by` names, and stops after validations without a better value.

    Each better value gets a checkpoint, at any save interval. The last one is saved as final. All
    ranks have the same validated values, so all ranks stop after the same step.

    Args:
        writer: Writes the checkpoints, and has the name of the column.
        stop_after: The number of validations in succession without a better value after which
            training stops; None: training does not stop early.
    """

    def __init__(self, writer: CheckpointWriter, stop_after: int | None) -> None:
        super().__init__(
            writer.best_by,
            patience=sys.maxsize if stop_after is None else stop_after,
            check_finite=False,  # NaN is no better value, and no reason to stop
            check_on_train_epoch_end=False,
        )
        self.writer = writer
        self.stops = stop_after is not None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets one validation step before training check the name of the column."""
        if self.monitor != "val_loss":
            trainer.num_sanity_val_steps = 1

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sets whether a higher or a lower value is better."""
        if higher_is_better(self.monitor, trainer, pl_module):
            self.writer.best_is_highest = True
            self.mode, self.best_score = "max", torch.tensor(-torch.inf)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares the new value with the best one.

        Raises:
            UserError: There is no validated column of this name.
        """
        values = logged_values(trainer, "val_")
        if trainer.state.fn == "fit" and self.monitor not in values:
            raise UserError(
                f"--best-by {self.monitor}: there is no such validated value. "
                f"There are {', '.join([*values, 'last'])}."
            )
        super().on_validation_end(trainer, pl_module)
        if self.stops and self.wait_count == 0 and not trainer.sanity_checking:
            self.writer.wanted_step = trainer.global_step


class StopOnSignal(pl.Callback):
    """Saves a checkpoint and ends training after the step in which a stop signal arrived.

    A second signal ends the process at once; complete checkpoints are not changed.

    Args:
        writer: Writes the checkpoint.
        say: Prints a line for the user.
    """

    #: The largest number of steps between two agreements of several ranks on whether to stop. The
    #: ranks agree about once a second, more often because of this limit, and after each validation.
    AGREE_AT_MOST_EVERY = 32

    def __init__(self, writer: CheckpointWriter, say: Callable[[str], object]) -> None:
        self.writer, self.say = writer, say
        self.request = StopRequest()
        self._before: dict[int, Any] = {}
        self._agree_at = 0  # a step
        self._agreed = 0, 0.0  # the step and the time of the last agreement

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Installs the signal handlers for training."""
        if stage == "fit":
            self._before = handle_signals(self._receive)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Installs the signal handlers again, because Lightning has installed its own."""
        handle_signals(self._receive)
        # Lightning's handler also called ours. Lightning itself would stop without a checkpoint.
        trainer._signal_connector.received_sigterm = False

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restores the previous signal handlers."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.request.received
        if self.request.is_repeated(number):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif is_first:
            with contextlib.suppress(RuntimeError):  # the signal came while a line was written
                self.say(
                    "Stopping: a checkpoint will be saved. A second signal ends the run at once."
                )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lets the ranks agree before the next step: they have waited for each other anyway."""
        self._agree_at = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Stops after a signal, when the previous step, its validation and its save are complete.

        Raises:
            Stopped: A rank received a signal.
        """
        if number := self._agreed_signal(trainer):
            self.writer.save(trainer, store_values=False)
            raise Stopped(number, trainer.global_step)

    def _agreed_signal(self, trainer: pl.Trainer) -> int:
        """Returns the signal that any rank received, or 0; all ranks stop after the same step."""
        if trainer.world_size == 1:
            return self.request.received
        step, now = trainer.global_step, time.monotonic()
        if step < self._agree_at:
            return 0
        agreed_step, agreed_at = self._agreed
        values = torch.tensor([self.request.received, now - agreed_at])
        message = copied(values, trainer.strategy.root_device)
        torch.distributed.all_reduce(message, torch.distributed.ReduceOp.MAX)
        number, seconds = message.tolist()
        steps_in_a_second = int((step - agreed_step) / seconds)
        self._agree_at = step + max(1, min(self.AGREE_AT_MOST_EVERY, steps_in_a_second))
        self._agreed = step, now
        return int(number)
