"""Provides callbacks that correct step counters, find the best value, and stop training."""

import math
import signal
import time
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch

from megakit.checkpoints.select import is_better
from megakit.checkpoints.writer import CheckpointWriter, logged_values, validation_is_due
from megakit.errors import Stopped, UserError
from megakit.runtime.patching import patch, require_attribute
from megakit.runtime.signals import StopRequest, handle_signals
from megakit.training.validation import higher_is_better


class ExactSteps(pl.Callback):
    """Makes a resumed training count and validate like an uninterrupted one.

    The callback makes three corrections. A checkpoint stores one step too few, because Lightning
    saves its batch counters before it counts the step. Lightning counts steps, and NeMo's data loop
    counts micro batches, so a resumed epoch has no correct end. Lightning repeats the validation of
    the resumed step, even if the checkpoint was saved after this validation.
    """

    def __init__(self) -> None:
        self._validated_step = 0
        self._val_check_batch: float | None = None  # Lightning's value while it is replaced

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sets the counters to the number of completed steps, after a checkpoint was loaded."""
        loop, fetcher = (
            trainer.fit_loop.epoch_loop,
            require_attribute(trainer.fit_loop, "_data_fetcher"),
        )
        progress = loop.batch_progress
        missing = trainer.global_step - progress.total.completed
        for counter in (progress.total, progress.current):
            completed = counter.completed + missing
            for name in ("ready", "started", "processed", "completed"):
                patch(counter, name, completed)
        if not trainer.global_step:
            return
        per_step = getattr(getattr(trainer.strategy, "data_sampler", None), "num_microbatches", 1)
        fetcher.fetched += (per_step - 1) * progress.current.completed
        is_due = require_attribute(loop, "_should_check_val_fx")(fetcher)
        if self.is_validated(trainer) or not is_due:
            # Lightning tests whether the number of batches is a multiple of this value.
            self._val_check_batch = trainer.val_check_batch
            trainer.val_check_batch = math.inf
            patch(loop.val_loop, "_has_run", True)  # at the end of an epoch

    def is_validated(self, trainer: pl.Trainer) -> bool:
        """Tells whether the resumed step was validated before its checkpoint was saved."""
        return self._validated_step == trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Restores Lightning's values: from this step on, validations are new."""
        if self._val_check_batch is not None:
            trainer.val_check_batch, self._val_check_batch = self._val_check_batch, None
            patch(trainer.fit_loop.epoch_loop.val_loop, "_has_run", False)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stores the validated step for later checkpoints."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validated_step = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this callback for a checkpoint."""
        return {"validated_step": self._validated_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of this callback from a checkpoint."""
        self._validated_step = int(state_dict["validated_step"])


class ExactValidation(ExactSteps):
    """Validates whenever `validation_is_due`, also after the last step.

    This class includes the corrections of `ExactSteps`, for checkpoints of `CheckpointWriter`,
    which are always saved after the validation.
    """

    def is_validated(self, trainer: pl.Trainer) -> bool:
        """Returns True: no checkpoint is saved before the validation of its step."""
        return True

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Tells Lightning whether to validate after the step that begins."""
        super().on_train_batch_start(trainer, *args)
        is_due = validation_is_due(trainer, trainer.global_step + 1)
        trainer.val_check_batch = 1 if is_due else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Returns no state: nothing has to be stored."""
        return {}


class StopWithoutProgress(pl.Callback):
    """Checks the column that `--best-by` names, and applies `--stop-after`.

    With `--stop-after`, each better value gets a checkpoint, at any save interval. To stop, the
    callback sets `trainer.should_stop`; the checkpoint writer then saves this step as final. All
    ranks have the same validated values, so all ranks stop after the same step.

    Attributes:
        stop_after: The number of successive validations without a better value after which
            training stops; None: training does not stop early.
        best: The best value so far; None without `stop_after`.
        num_without: The number of validations since the best value.
    """

    def __init__(self, writer: CheckpointWriter, stop_after: int | None) -> None:
        self.writer = writer
        self.stop_after = stop_after
        self.best: float | None = None
        self.num_without = 0

    @property
    def may_stop(self) -> bool:
        """Whether training stops if the next validation has no better value."""
        return self.stop_after is not None and self.num_without + 1 >= self.stop_after

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sets whether a higher or a lower value is better."""
        name = self.writer.best_by
        if name != "last":
            self.writer.best_is_highest = higher_is_better(name, trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuses options that need validation in a run without validation.

        Raises:
            UserError: `--best-by` or `--stop-after` is set, and there is no validation data.
        """
        needs = [] if self.writer.best_by in ("val_loss", "last") else ["--best-by"]
        needs += [] if self.stop_after is None else ["--stop-after"]
        if needs and not trainer.enable_validation:
            raise UserError(
                f"{' and '.join(needs)}: this run has no validation data. Leave the option out."
            )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares the new value with the best value.

        Raises:
            UserError: There is no validated column of the name in `--best-by`.
        """
        if trainer.state.fn != "fit":
            return
        values, name = logged_values(trainer, "val_"), self.writer.best_by
        if name != "last" and name not in values:
            raise UserError(
                f"--best-by {name}: there is no such validated value. "
                f"There are {', '.join([*values, 'last'])}."
            )
        if trainer.sanity_checking or self.stop_after is None:
            return
        if self.best is None or is_better(values[name], self.best, self.writer.best_is_highest):
            self.best, self.num_without = values[name], 0
            self.writer.wanted_step = trainer.global_step  # writes a checkpoint of the best value
        else:
            self.num_without += 1
        if self.num_without >= self.stop_after:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this callback for a checkpoint."""
        return {"best": self.best, "num_without": self.num_without}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of this callback from a checkpoint."""
        self.best, self.num_without = state_dict["best"], state_dict["num_without"]


class StopOnSignal(pl.Callback):
    """Saves a checkpoint and ends training after the step in which a stop signal arrived.

    A second signal ends the process at once; complete checkpoints are not changed.
    """

    #: The largest number of steps between two agreements of several ranks on whether to stop. The
    #: ranks agree about once a second, or more often because of this limit.
    AGREE_AT_MOST_EVERY = 8

    def __init__(self, writer: CheckpointWriter) -> None:
        self.writer = writer
        self.request = StopRequest()
        self._before: dict[int, Any] = {}
        self._agree_at: int | None = None
        self._agreed_at = 0.0
        self._num_steps = 1  # between the last two agreements

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Installs the signal handlers for training."""
        if stage == "fit":
            self._before = handle_signals(self._receive)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Installs the signal handlers again, because Lightning has installed its own."""
        handle_signals(self._receive)
        # Lightning's handler also called ours. Lightning itself would stop without a checkpoint.
        patch(trainer._signal_connector, "received_sigterm", False)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restores the previous signal handlers."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.request.is_repeated(number):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

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
        if self._agree_at is None:
            self._agree_at, self._agreed_at = step, now
        if step < self._agree_at:
            return 0
        message = torch.tensor(
            [self.request.received, now - self._agreed_at], device=trainer.strategy.root_device
        )
        torch.distributed.all_reduce(message, torch.distributed.ReduceOp.MAX)
        number, seconds = message.tolist()
        # The first agreement has no earlier one to measure from; the next step may be a long one.
        steps_per_second = self._num_steps / seconds if seconds else 1
        self._num_steps = int(max(1, min(self.AGREE_AT_MOST_EVERY, steps_per_second)))
        self._agree_at, self._agreed_at = step + self._num_steps, now
        return int(number)
