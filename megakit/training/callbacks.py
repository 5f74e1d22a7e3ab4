"""What our trainer does beside training: count, report, stop when asked."""

import signal
import time
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from megakit.checkpoints.writer import CheckpointWriter, will_validate
from megakit.errors import Stopped
from megakit.reporting.console import Console
from megakit.reporting.metrics import Metrics, MetricsFile
from megakit.training.strategy import from_last_pipeline_stage

#: Steps between two rows of metrics.csv and two points of a curve.
LOG_INTERVAL = 10


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


class Reporter(pl.Callback):
    """Writes metrics.csv and TensorBoard's curves, shows progress, and keeps the time.

    Args:
        console: Where progress is shown.
        title: What is going on.
        metrics: The file to append to; None on ranks that write nothing.

    Attributes:
        seconds: Time from the first step to the last, over all starts of the run.
        validation_seconds: The part of it spent validating.
    """

    def __init__(self, console: Console, title: str, metrics: MetricsFile | None) -> None:
        self.console = console
        self.title = title
        self.metrics = metrics
        self.seconds = 0.0
        self.validation_seconds = 0.0
        self.val_loss: float | None = None
        self._lr: float | None = None
        self._row: Metrics | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock and the progress display."""
        self._started = time.perf_counter()
        self._seconds_before = self.seconds
        start = trainer.global_step
        self.progress = self.console.progress(self.title, trainer.max_steps, start)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Notes the learning rate: after the step it is the next one's already."""
        if self._is_logged(trainer, trainer.global_step + 1):
            self._lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Logs the step, if it is one to be logged."""
        self.seconds = self._seconds_before + time.perf_counter() - self._started
        step = trainer.global_step
        if not self._is_logged(trainer, step):
            return
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        sampler = trainer.datamodule.data_sampler
        grad_norm = trainer.strategy.grad_norm
        self._row = Metrics(
            step=step,
            consumed_samples=step * sampler.global_batch_size,
            train_loss=float(from_last_pipeline_stage(loss.detach().clone())),
            lr=self._lr,
            grad_norm=None if grad_norm is None else float(grad_norm),
        )
        if not will_validate(trainer):
            self._write(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock of this validation."""
        self._validation_started = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Adds the validation loss to the step's row."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.validation_seconds += time.perf_counter() - self._validation_started
        self.val_loss = float(trainer.callback_metrics["val_loss"])
        if self._row is not None:
            self._row.val_loss = self.val_loss
            self._write(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock and ends the progress display."""
        self.seconds = self._seconds_before + time.perf_counter() - self._started
        self.progress.close(trainer.global_step)

    def on_exception(self, trainer: pl.Trainer, *args: Any) -> None:
        """Ends the progress display, so that what follows has a line of its own."""
        if hasattr(self, "progress"):
            self.progress.close(trainer.global_step)

    def on_save_checkpoint(self, trainer: pl.Trainer, *args: Any) -> None:
        """Hands TensorBoard's curves to the system: a resumption takes them as written."""
        if self.metrics is not None and isinstance(trainer.logger, TensorBoardLogger):
            trainer.logger.experiment.flush()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint remembers of this callback."""
        return {
            "seconds": self.seconds,
            "validation_seconds": self.validation_seconds,
            "val_loss": self.val_loss,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on counting where the checkpoint stopped."""
        self.seconds = float(state_dict["seconds"])
        self.validation_seconds = float(state_dict["validation_seconds"])
        self.val_loss = state_dict.get("val_loss")

    def _is_logged(self, trainer: pl.Trainer, step: int) -> bool:
        marks = (LOG_INTERVAL, trainer.val_check_batch)
        return step in (1, trainer.max_steps) or any(step % mark == 0 for mark in marks)

    def _write(self, trainer: pl.Trainer) -> None:
        row, self._row = self._row, None
        assert row is not None
        self.progress.update(row.step, {"loss": row.train_loss, "validation": self.val_loss})
        if self.metrics is None:
            return
        self.metrics.append(row)
        if trainer.logger is not None:
            curves = ("train_loss", "val_loss", "lr", "grad_norm")
            values = {name: getattr(row, name) for name in curves}
            trainer.logger.log_metrics(
                {name: value for name, value in values.items() if value is not None}, row.step
            )


class StopOnSignal(pl.Callback):
    """Ends training after the step in which SIGINT, SIGTERM or SIGUSR1 came, with a checkpoint.

    A second signal ends the process at once; complete checkpoints stay.

    Args:
        writer: Saves the checkpoint.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    #: Signals within so many seconds are one: `timeout`, `scancel` and Ctrl-C send theirs to every
    #: process of a job, and the launching process hands on its own.
    SAME = 0.5
    #: With several ranks, how often they agree on whether to stop: as many steps as take a second,
    #: and at most so many.
    AGREE_AT_MOST_EVERY = 8

    def __init__(self, writer: CheckpointWriter) -> None:
        self.writer = writer
        self.received = 0
        self._received_at = 0.0
        self._before: dict[int, Any] = {}
        self._agree_at: int | None = None
        self._agreed_at = 0.0
        self._steps_since_agreement = 1

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Starts to listen."""
        if stage == "fit":
            self._before = {number: signal.signal(number, self._receive) for number in self.SIGNALS}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listens again: Lightning has put handlers of its own in place by now."""
        for number in self.SIGNALS:
            signal.signal(number, self._receive)
        # What came in between is ours to answer; Lightning's answer saves nothing.
        trainer._signal_connector.received_sigterm = False

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Puts back who listened before."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received and now - self._received_at > self.SAME:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self.received:
            self.received, self._received_at = number, now

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Stops if asked to: the step before is over by now, its validation and saving included."""
        number = self._agreed(trainer)
        if number:
            self.writer.save(trainer, regular=False)
            raise Stopped(number, trainer.global_step)

    def _agreed(self, trainer: pl.Trainer) -> int:
        """The signal that any rank received; ranks have to stop after the same step."""
        if trainer.world_size == 1:
            return self.received
        step, now = trainer.global_step, time.monotonic()
        if self._agree_at is None:
            self._agree_at, self._agreed_at = step, now
        if step < self._agree_at:
            return 0
        message = torch.tensor(
            [self.received, now - self._agreed_at], device=trainer.strategy.root_device
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
