"""Reports a training run: metrics.csv, loggers, progress, times, and warnings about user code."""

import math
import time
from typing import Any

import lightning.pytorch as pl

from megakit.job.console import Console
from megakit.nemo.writer import CheckpointWriter, logged_values
from megakit.runtime.patching import require_attribute
from megakit.training.first_look import say_size_and_warnings
from megakit.training.metrics_csv import Metrics, MetricsFile


class Reporter(pl.Callback):
    """Writes metrics.csv, logs to the trainer's loggers, shows progress, and measures time.

    The loggers get the columns of metrics.csv and `samples_per_second`. The trainer's
    `log_every_n_steps` is the interval of all of these. Ranks that write no files have no
    `metrics_file`. The checkpoint writer measures the time of saves.

    Attributes:
        seconds: Seconds from the first step to the last step, over all starts of the run.
        validation_seconds: The part of `seconds` that validation took.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        writer: CheckpointWriter,
        metrics_file: MetricsFile | None,
    ) -> None:
        self.console, self.title, self.writer = console, title, writer
        self.metrics_file = metrics_file
        self.seconds = 0.0
        self.validation_seconds = 0.0
        self._row: Metrics | None = None
        self._nan = set[str]()  # columns whose NaN the user knows of
        #: The seconds of all starts before the first step of this start.
        self._before: tuple[float, ...] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the size of the run; starts the clock and the progress display."""
        self._loop: Any = trainer.fit_loop.epoch_loop
        data = require_attribute(trainer, "datamodule")
        self._batch_size: int = data.data_sampler.global_batch_size
        # Workers read nothing here: a file that this process opens must not be theirs, too.
        dataset = None if getattr(data, "num_workers", 1) else getattr(data, "train_set", None)
        say_size_and_warnings(self.console, pl_module, dataset, trainer.max_steps, self._batch_size)
        self._before = self._totals()
        self._started = time.perf_counter() - self.seconds
        self._last_logged = trainer.global_step, self.stepping_seconds
        self.progress = self.console.progress(self.title, trainer.max_steps, trainer.global_step)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Stores the learning rate of this step; after the step, the next rate is already set."""
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Logs the step if it is one of the logged steps."""
        if not self._loop.is_logged():
            return
        if trainer.should_stop:  # a callback before this one may have decided it
            self._loop.share(outputs)
        self._update_seconds()
        values = logged_values(trainer, "train_")
        row = Metrics(
            step=trainer.global_step,
            consumed_samples=trainer.global_step * self._batch_size,
            train_loss=values.pop("train_loss"),
            lr=self._lr,
            grad_norm=getattr(trainer.strategy, "grad_norm", None),
            values=values,
        )
        (step_before, seconds_before), now = self._last_logged, self.stepping_seconds
        self._rate = (row.step - step_before) * self._batch_size / max(now - seconds_before, 1e-9)
        self._last_logged = row.step, now
        if self._loop.validation_is_due():
            self._row = row
        else:
            self._write(trainer, row)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock of the validation, and drops the values of earlier validations.

        Lightning keeps a value until it is logged again.
        """
        for name in [name for name in trainer.callback_metrics if name.startswith("val_")]:
            del trainer.callback_metrics[name]
        self._validation_started = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Adds the validated values to the row of the step, and writes the row."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.validation_seconds += time.perf_counter() - self._validation_started
        self._update_seconds()  # a checkpoint of this step contains both times
        row, self._row = self._row, None
        if row is not None:
            values = logged_values(trainer, "val_")
            for name, value in values.items():
                if math.isnan(value) and name not in self._nan:
                    self._nan.add(name)
                    self.console.say(
                        f"Warning: {name} is NaN, by which --best-by chooses no checkpoint. Check "
                        "the metric or the loss of this name, and the validation set."
                    )
            row.val_loss = values.pop("val_loss", None)
            row.values |= values
            self._write(trainer, row)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        self._update_seconds()
        self.on_save_checkpoint(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, *args: Any) -> None:
        """Lets the loggers write what they have, because a resumed run does not log it again."""
        for logger in trainer.loggers:
            logger.save()

    def state_dict(self) -> dict[str, float]:
        """Returns the state of this callback for a checkpoint."""
        return {"seconds": self.seconds, "validation_seconds": self.validation_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of this callback from a checkpoint."""
        self.seconds = float(state_dict["seconds"])
        self.validation_seconds = float(state_dict["validation_seconds"])

    @property
    def stepping_seconds(self) -> float:
        """Returns the seconds of steps without validation and saves, over all starts of the run."""
        return self.seconds - self.validation_seconds - self.writer.seconds

    def times(self, total: float) -> dict[str, float]:
        """Returns the seconds of each activity in this start of the run.

        Of the `total` seconds since the script began, `start_up` is the time of no other entry.
        """
        now = self._totals()
        before = self._before or now  # without steps to do, `on_train_start` was not called
        steps, validation, saves = (n - b for n, b in zip(now, before, strict=True))
        data = self._loop.fetch_seconds if self._before else 0.0
        return {
            "start_up": total - steps - validation - saves,
            "data": data,
            "training": steps - data,
            "validation": validation,
            "checkpoints": saves,
        }

    def _totals(self) -> tuple[float, ...]:
        return self.stepping_seconds, self.validation_seconds, self.writer.seconds

    def _update_seconds(self) -> None:
        self.seconds = time.perf_counter() - self._started

    def _write(self, trainer: pl.Trainer, row: Metrics) -> None:
        """Passes a row to metrics.csv, the loggers and the progress line."""
        validated = logged_values(trainer, "val_")  # of this step, or of an earlier one
        losses = {"loss": row.train_loss, "validation": validated.pop("val_loss", None)}
        self.progress.update(row.step, losses | row.values | validated)
        if self.metrics_file is not None:
            self.metrics_file.append(row)
        columns = {name: row[name] for name in ("train_loss", "val_loss", "lr", "grad_norm")}
        columns |= row.values | {"samples_per_second": self._rate}
        for logger in trainer.loggers:
            logger.log_metrics({n: v for n, v in columns.items() if v is not None}, row.step)
