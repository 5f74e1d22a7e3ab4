"""What our trainer does beside training: count, choose the best, and stop when asked."""

import signal
import time
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch

from megakit.checkpoints.select import is_better
from megakit.checkpoints.writer import CheckpointWriter, logged_values
from megakit.errors import Stopped, UserError
from megakit.runtime.patching import replace
from megakit.runtime.signals import StopRequest, handle_signals
from megakit.training.validation import higher_is_better


class ExactSteps(pl.Callback):
    """Lets a resumed run count, and validate, as one that was never stopped.

    Lightning saves its batch counters in the middle of a step, one behind. It validates once more
    when it goes on from a step that was validated. And it validates only at multiples of the
    interval; here it does so after the last step as well.
    """

    def __init__(self) -> None:
        self._val_check_batch: int | float | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After a checkpoint was loaded: sets the counters to the steps that were done."""
        # Never, until the first step begins.
        self._val_check_batch, trainer.val_check_batch = trainer.val_check_batch, float("inf")
        progress = trainer.fit_loop.epoch_loop.batch_progress
        for counter in (progress.total, progress.current):
            counter.ready = counter.started = trainer.global_step
            counter.processed = counter.completed = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Before the first step: validates as before; before the last: makes it a validated one."""
        if self._val_check_batch is not None:
            self._val_check_batch, trainer.val_check_batch = None, self._val_check_batch
        if trainer.global_step == trainer.max_steps - 1:
            trainer.val_check_batch = trainer.max_steps


class StopWithoutProgress(pl.Callback):
    """Finds the best value of what `--best-by` names, and applies `--stop-after`.

    Each better value gets a checkpoint, whatever the save interval. At the stop,
    `trainer.should_stop` makes Lightning end the training after this step, and makes
    the checkpoint writer save and mark this step's checkpoint. All ranks have the same validated
    values, so all ranks stop after the same step.

    Args:
        writer: Chooses the best checkpoint.
        stop_after: Stop after so many validations in a row without a better value; None: never.

    Attributes:
        best: The best value so far, or None.
        num_without: Validations since then.
    """

    def __init__(self, writer: CheckpointWriter, stop_after: int | None) -> None:
        self.writer = writer
        self.stop_after = stop_after
        self.best: float | None = None
        self.num_without = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds out whether a higher or a lower value is better."""
        name = self.writer.best_by
        if name != "last":
            self.writer.best_is_highest = higher_is_better(name, trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuses options that need validation in a run without validation."""
        needs = [] if self.writer.best_by in ("val_loss", "last") else ["--best-by"]
        needs += [] if self.stop_after is None else ["--stop-after"]
        if needs and not trainer.enable_validation:
            raise UserError(
                f"{' and '.join(needs)}: this run has no validation data. Leave the option out."
            )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares the new value with the best one."""
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
            self.writer.wanted_step = trainer.global_step  # what the run stops for is kept
        else:
            self.num_without += 1
        if self.num_without >= self.stop_after:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint remembers of this callback."""
        return {"best": self.best, "num_without": self.num_without}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on counting where the checkpoint stopped."""
        best = state_dict["best"]
        self.best = None if best is None else float(best)
        self.num_without = int(state_dict["num_without"])


class StopOnSignal(pl.Callback):
    """Ends training after the step in which a stopping signal came, with a checkpoint.

    A second signal ends the process at once; complete checkpoints stay.

    Args:
        writer: Saves the checkpoint.
    """

    #: With several ranks, how often they agree on whether to stop: as many steps as take a second,
    #: and at most so many.
    AGREE_AT_MOST_EVERY = 8

    def __init__(self, writer: CheckpointWriter) -> None:
        self.writer = writer
        self.request = StopRequest()
        self._before: dict[int, Any] = {}
        self._agree_at: int | None = None
        self._agreed_at = 0.0
        self._steps_since_agreement = 1

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Starts to listen."""
        if stage == "fit":
            self._before = handle_signals(self._receive)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listens again: Lightning has put handlers of its own in place by now."""
        handle_signals(self._receive)
        # What came in between is ours to answer; Lightning's answer saves nothing.
        replace(trainer._signal_connector, "received_sigterm", False)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Puts back who listened before."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.request.is_repeated(number):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Stops if asked to: the step before is over by now, its validation and saving included."""
        number = self._agreed(trainer)
        if number:
            self.writer.save(trainer, regular=False)
            raise Stopped(number, trainer.global_step)

    def _agreed(self, trainer: pl.Trainer) -> int:
        """The signal that any rank received; ranks have to stop after the same step."""
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
        # The first interval was one step, or none.
        steps = max(1, self._steps_since_agreement)
        self._steps_since_agreement = int(
            max(1, min(self.AGREE_AT_MOST_EVERY, steps / max(seconds, 1e-3)))
        )
        self._agree_at, self._agreed_at = step + self._steps_since_agreement, now
        return int(number)
