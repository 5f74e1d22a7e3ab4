"""Reports a training run: metrics.csv, loggers, progress, times, and warnings about user code."""

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import param_is_not_shared
from torch.utils.data import get_worker_info

from megakit.checkpoints.writer import CheckpointWriter, logged_values
from megakit.errors import printable
from megakit.job.cluster import is_first
from megakit.job.console import Console
from megakit.job.identity import project_of
from megakit.runtime.patching import require_attribute
from megakit.training.metrics_csv import COLUMNS, Metrics, MetricsFile, as_stored
from megakit.training.step_loop import StepLoop


class Reporter(pl.Callback):
    """Writes metrics.csv, logs to the trainer's loggers, shows progress, and measures time.

    The loggers get the columns of metrics.csv and `samples_per_second`. The trainer's
    `log_every_n_steps` is the interval of all of these. Ranks that write no files have no
    `metrics_file`. The checkpoint writer measures the time of saves.

    Attributes:
        seconds: Seconds from the first step to the last step, over all starts of the run.
        validation_seconds: The part of `seconds` that validation took.
        val_loss: The last validation loss, or None.
        first: The first value of each loss or named value, by column of metrics.csv. Only ranks
            that write the file know the values of earlier starts.
        last: The last value of each loss or named value.
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
        self.val_loss: float | None = None
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        for row in metrics_file.kept if metrics_file is not None else ():
            self._update_first_and_last(row)
        self._lr: float | None = None
        self._row: Metrics | None = None
        self._at_start: dict[str, float] | None = None
        self._setup_seconds = self._fetch_seconds = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Measures how long the data took to open, which is what Lightning did last."""
        began = getattr(trainer.strategy, "opens_data_at", None)
        self._setup_seconds = 0.0 if began is None else time.perf_counter() - began

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the size of the run; starts the clock and the progress display."""
        data = require_attribute(trainer, "datamodule")
        self._batch_size: int = data.data_sampler.global_batch_size
        self.console.say(
            f"  {parameters_of_the_job(pl_module):,} parameters, "
            f"{trainer.max_steps:,} steps of {self._batch_size:,} samples"
        )
        self._started = time.perf_counter()
        self._at_start = self._totals()
        self._last_logged = trainer.global_step, self.stepping_seconds
        self.progress = self.console.progress(self.title, trainer.max_steps, trainer.global_step)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Stores the learning rate of this step; after the step, the next rate is already set."""
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Logs the step if it is one of the logged steps."""
        loop, step = _loop_of(trainer), trainer.global_step
        if not loop.is_logged():
            return
        if trainer.should_stop:  # a callback before this one may have decided it
            loop.share(outputs)
        self._update_seconds(loop)
        values = logged_values(trainer, "train_")
        grad_norm = getattr(trainer.strategy, "grad_norm", None)
        self._row = Metrics(
            step=step,
            consumed_samples=step * self._batch_size,
            train_loss=values.pop("train_loss"),
            lr=self._lr,
            grad_norm=None if grad_norm is None else float(grad_norm),
            values=values,
        )
        (step_before, seconds_before), now = self._last_logged, self.stepping_seconds
        self._rate = (step - step_before) * self._batch_size / max(now - seconds_before, 1e-9)
        self._last_logged = step, now
        if not loop.validation_is_due():
            self._write(trainer, self._row)

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
        self._update_seconds(_loop_of(trainer))  # a checkpoint of this step contains both times
        values = logged_values(trainer, "val_")
        self.val_loss = values.pop("val_loss", None)
        if self._row is not None:
            self._row.val_loss = self.val_loss
            self._row.values |= values
            self._write(trainer, self._row)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        self._update_seconds(_loop_of(trainer))
        self.on_save_checkpoint(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, *args: Any) -> None:
        """Lets the loggers write what they have, because a resumed run does not log it again."""
        for logger in trainer.loggers:
            logger.save()

    def state_dict(self) -> dict[str, float | None]:
        """Returns the state of this callback for a checkpoint."""
        names = ("seconds", "validation_seconds", "val_loss")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of this callback from a checkpoint."""
        self.seconds = float(state_dict["seconds"])
        self.validation_seconds = float(state_dict["validation_seconds"])
        self.val_loss = state_dict.get("val_loss")

    @property
    def stepping_seconds(self) -> float:
        """Returns the seconds of steps without validation and saves, over all starts of the run."""
        return self.seconds - self.validation_seconds - self.writer.seconds

    def times(self, total: float) -> dict[str, float]:
        """Returns the seconds of each activity in this start of the run.

        Of the `total` seconds since the script began, `start_up` is the time of no other entry.
        """
        now = self._totals()
        before = self._at_start or now  # without steps to do, `on_train_start` was not called
        spent = {name: now[name] - before[name] for name in now}
        return {
            "start_up": total - sum(spent.values()) - self._setup_seconds,
            "data": self._setup_seconds + self._fetch_seconds,
            "training": spent["steps"] - self._fetch_seconds,
            "validation": spent["validation"],
            "checkpoints": spent["checkpoints"],
        }

    def _totals(self) -> dict[str, float]:
        return {
            "steps": self.stepping_seconds,
            "validation": self.validation_seconds,
            "checkpoints": self.writer.seconds,
        }

    def _update_seconds(self, loop: StepLoop) -> None:
        assert self._at_start is not None
        self.seconds = sum(self._at_start.values()) + time.perf_counter() - self._started
        self._fetch_seconds = loop.fetch_seconds

    def _write(self, trainer: pl.Trainer, row: Metrics) -> None:
        """Passes a row to metrics.csv, the loggers, the progress line and the summary."""
        self._row = None
        self._update_first_and_last(row)
        losses = {"loss": row.train_loss, "validation": self.val_loss}
        further = {name: value for name, value in self.last.items() if name not in COLUMNS}
        self.progress.update(row.step, losses | further)
        if self.metrics_file is not None:
            self.metrics_file.append(row)
        columns = {"train_loss": row.train_loss, "val_loss": row.val_loss, **row.values}
        columns |= {"lr": row.lr, "grad_norm": row.grad_norm, "samples_per_second": self._rate}
        for logger in trainer.loggers:
            logger.log_metrics({n: v for n, v in columns.items() if v is not None}, row.step)

    def _update_first_and_last(self, row: Metrics) -> None:
        """Stores a row's values as metrics.csv rounds them, for the summary and the console."""
        columns = {"train_loss": row.train_loss, "val_loss": row.val_loss} | row.values
        values = {name: as_stored(v) for name, v in columns.items() if v is not None}
        self.first = values | self.first
        self.last |= values


def show_warnings(console: Console) -> None:
    """Shows warnings about the project's own code also on the console, each place once in a job.

    All warnings are in the log; with `--verbose`, the log is the console.
    """
    root, log = project_of(Path(sys.argv[0])), warnings.showwarning
    shown = set[str]()

    def show(message: Any, category: Any, filename: str, lineno: int, *more: Any) -> None:
        log(message, category, filename, lineno, *more)
        path = Path(os.path.relpath(os.path.realpath(filename), root))
        place = f"{path.name}, line {lineno}"
        is_own = path.suffix == ".py" and not {"..", "site-packages", "megakit"} & {*path.parts}
        if not is_own or category not in (UserWarning, RuntimeWarning) or place in shown:
            return
        shown.add(place)
        # A worker of a loader has its parent's connection, and must not use it.
        if get_worker_info() is None and is_first(place):
            console.error(printable(f"Warning: {place}: {message}"))

    if console.is_diverted:
        warnings.showwarning = show  # type: ignore[assignment]  # Python calls it by position


def _loop_of(trainer: pl.Trainer) -> StepLoop:
    loop = trainer.fit_loop.epoch_loop
    assert isinstance(loop, StepLoop), "ExactStrategy and megakit.training.train set a StepLoop"
    return loop


def parameters_of_the_job(model: torch.nn.Module) -> int:
    """Returns the number of trained parameters of the whole model; every rank has to call it.

    Tied weights count once: under pipelines, Megatron marks the last stage's copy of an embedding.
    """
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    count = sum(
        weight.numel() * (tensor if getattr(weight, "tensor_model_parallel", False) else 1)
        for weight in model.parameters()
        if weight.requires_grad and param_is_not_shared(weight)
    )
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        total = torch.tensor(count, device=next(model.parameters()).device)
        group = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.all_reduce(total, group=group)
        count = int(total)
    return count
