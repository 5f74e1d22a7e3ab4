"""Reports a training run: metrics.csv rows, curves, progress, and the time of each activity."""

import time
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import loops
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities.types import STEP_OUTPUT
from megatron.core import parallel_state
from megatron.core.transformer.module import param_is_not_shared

from megakit.checkpoints.writer import CheckpointWriter, logged_values, validation_is_due
from megakit.reporting.console import Console
from megakit.reporting.metrics import COLUMNS, Metrics, MetricsFile, as_stored
from megakit.reporting.tensorboard import TensorBoard
from megakit.runtime.patching import require_attribute
from megakit.training.validation import FromLastStage, to_floats

#: Steps between two rows of metrics.csv, and between two points of a curve.
LOG_INTERVAL = 10


class Reporter(pl.Callback):
    """Writes metrics.csv and TensorBoard curves, shows progress, and measures time.

    Ranks that write no files have no `metrics_file` and no `tensorboard`. The checkpoint writer
    measures the time of saves.

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
        tensorboard: TensorBoard | None,
    ) -> None:
        self.console, self.title, self.writer = console, title, writer
        self.metrics_file, self.tensorboard = metrics_file, tensorboard
        self.seconds = 0.0
        self.validation_seconds = 0.0
        self.val_loss: float | None = None
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        for row in metrics_file.kept if metrics_file is not None else ():
            self._update_first_and_last(row)
        self._from_last_stage = FromLastStage()
        self._lr: float | None = None
        self._row: Metrics | None = None
        self._at_start: dict[str, float] | None = None

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
        is_logged = self._is_logged(trainer, trainer.global_step + 1)
        self._lr = trainer.optimizers[0].param_groups[0]["lr"] if is_logged else None

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        *args: Any,
    ) -> None:
        """Logs the step if it is one of the logged steps."""
        self._update_seconds()
        step = trainer.global_step
        if not self._is_logged(trainer, step):
            return
        clock = require_attribute(trainer, "profiler")
        if isinstance(clock, DataClock):
            clock.check()
        assert outputs is not None
        strategy = trainer.strategy
        values = to_floats(self._from_last_stage(outputs, strategy.root_device))
        grad_norm = require_attribute(strategy, "grad_norm")
        self._row = Metrics(
            step=step,
            consumed_samples=step * self._batch_size,
            train_loss=values.pop("loss"),
            lr=self._lr,
            grad_norm=None if grad_norm is None else float(grad_norm),
            values={f"train_{name}": value for name, value in values.items()}
            | logged_values(trainer, "train_"),
        )
        (step_before, seconds_before), now = self._last_logged, self.stepping_seconds
        self._rate = (step - step_before) * self._batch_size / max(now - seconds_before, 1e-9)
        self._last_logged = step, now
        if not validation_is_due(trainer, step):
            self._write(self._row)

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
        values = logged_values(trainer, "val_")
        self.val_loss = values.pop("val_loss", None)
        if self._row is not None:
            self._row.val_loss = self.val_loss
            self._row.values |= values
            self._write(self._row)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock and ends the progress display."""
        self._update_seconds()
        self.progress.close()
        self.on_save_checkpoint()

    def on_exception(self, *args: Any) -> None:
        """Ends the progress line, so that the next message starts on a new line."""
        if hasattr(self, "progress"):
            self.progress.close()

    def on_save_checkpoint(self, *args: Any) -> None:
        """Flushes the TensorBoard curves, because a resumed run does not write them again."""
        if self.tensorboard is not None:
            self.tensorboard.flush()

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

    def times(self, total: float, clock: "DataClock") -> dict[str, float]:
        """Returns the seconds of each activity in this start of the run.

        Of the `total` seconds since the script began, `start_up` is the time of no other entry.
        """
        now = self._totals()
        before = self._at_start or now  # without steps to do, `on_train_start` was not called
        spent = {name: now[name] - before[name] for name in now}
        return {
            "start_up": total - sum(spent.values()) - clock.setup_seconds,
            "data": clock.setup_seconds + clock.fetch_seconds,
            "training": spent["steps"] - clock.fetch_seconds,
            "validation": spent["validation"],
            "checkpoints": spent["checkpoints"],
        }

    def _totals(self) -> dict[str, float]:
        return {
            "steps": self.stepping_seconds,
            "validation": self.validation_seconds,
            "checkpoints": self.writer.seconds,
        }

    def _update_seconds(self) -> None:
        assert self._at_start is not None
        self.seconds = sum(self._at_start.values()) + time.perf_counter() - self._started

    def _is_logged(self, trainer: pl.Trainer, step: int) -> bool:
        is_regular = step % LOG_INTERVAL == 0 or step in (1, trainer.max_steps)
        return is_regular or trainer.should_stop or validation_is_due(trainer, step)

    def _write(self, row: Metrics) -> None:
        """Passes a row to metrics.csv, the curves, the progress line and the summary."""
        self._row = None
        self._update_first_and_last(row)
        losses = {"loss": row.train_loss, "validation": self.val_loss}
        further = {name: value for name, value in self.last.items() if name not in COLUMNS}
        self.progress.update(row.step, losses | further)
        if self.metrics_file is not None:
            self.metrics_file.append(row)
        if self.tensorboard is not None:
            curves = {"loss": row.train_loss, "lr": row.lr, "grad_norm": row.grad_norm}
            curves["samples_per_second"] = self._rate
            curves |= _without_prefix(row.values, "train_")
            self.tensorboard.add_values("train", curves, row.step)
            validated = {"loss": row.val_loss} | _without_prefix(row.values, "val_")
            self.tensorboard.add_values("validation", validated, row.step)

    def _update_first_and_last(self, row: Metrics) -> None:
        """Stores a row's values as metrics.csv rounds them, for the summary and the console."""
        columns = {"train_loss": row.train_loss, "val_loss": row.val_loss} | row.values
        values = {name: as_stored(v) for name, v in columns.items() if v is not None}
        self.first = values | self.first
        self.last |= values


def _without_prefix(values: dict[str, float], prefix: str) -> dict[str, float]:
    """Returns the values whose names have a prefix, by name without the prefix."""
    return {n.removeprefix(prefix): value for n, value in values.items() if n.startswith(prefix)}


_NOT_MEASURED = nullcontext()


class DataClock(Profiler):
    """Measures, as a Lightning profiler, how long training waits for data.

    Attributes:
        setup_seconds: Seconds to prepare and open the data.
        fetch_seconds: Seconds to fetch the training batches.
    """

    FETCH = f"[{require_attribute(loops, '_TrainingEpochLoop').__name__}].train_dataloader_next"

    def __init__(self) -> None:
        super().__init__()
        self.setup_seconds = 0.0
        self.fetch_seconds = 0.0
        self._has_fetched = False
        self._started: dict[str, float] = {}

    def profile(self, action_name: str) -> Any:
        """Returns a context that measures an action; Lightning has thirty of them in each step."""
        return super().profile(action_name) if self._is_data(action_name) else _NOT_MEASURED

    def start(self, action_name: str) -> None:
        """Stores the start time of an action of Lightning that loads data."""
        if self._is_data(action_name):
            self._started[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Adds the duration of an action that `start` stored."""
        if (started := self._started.pop(action_name, None)) is None:
            return
        seconds = time.perf_counter() - started
        if action_name == self.FETCH:
            self.fetch_seconds += seconds
            self._has_fetched = True
        elif action_name.endswith((".prepare_data", ".setup")):
            self.setup_seconds += seconds

    def _is_data(self, action_name: str) -> bool:
        return action_name == self.FETCH or action_name.startswith("[LightningDataModule]")

    def check(self) -> None:
        """Checks, after a training step, that Lightning has reported the fetching of batches.

        Raises:
            RuntimeError: Lightning uses another name for this action. The time would then count as
                training.
        """
        if not self._has_fetched:
            raise RuntimeError(
                f"Lightning's profiler action {self.FETCH} is gone from this version of the stack; "
                "megakit needs the versions in requirements.lock."
            )


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
