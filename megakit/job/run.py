"""Defines one start of a script, and what it adds to a trainer: callbacks, logger, results."""

import contextlib
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from megakit.checkpoints.manifest import (
    CHANGES,
    CODE,
    METRICS,
    Manifest,
    installed_versions,
    read_manifest,
    step_of,
)
from megakit.job.layout import Layout
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.plan import Plan
from megakit.job.runs import RunDirectory, Stage, check_still_ours
from megakit.reporting.console import Console
from megakit.reporting.files import partial_path
from megakit.runtime.accelerator import Accelerator, devices_of_ranks
from megakit.runtime.deferred import resume_collector

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch

    from megakit.reporting.tensorboard import RunLogger

OptionsT_co = TypeVar("OptionsT_co", bound=CommonOptions, covariant=True)


@dataclass
class Run(Generic[OptionsT_co]):
    """One start of a script; the script's work function receives it.

    Attributes:
        stage: The stage of the chain.
        options: Options of the command line.
        plan: The plan made from the options.
        console: Prints messages for the user.
        is_main: Whether this process writes files and prints messages; one process of a job does.
        began: When the script began, by `time.perf_counter()`.
    """

    stage: Stage
    options: OptionsT_co
    plan: Plan
    console: Console
    is_main: bool
    began: float

    @property
    def layout(self) -> Layout:
        """How the job's processes share the work."""
        return self.plan.layout

    @property
    def accelerator(self) -> Accelerator:
        """The device that the job runs on."""
        return self.plan.accelerator

    @property
    def precision(self) -> str:
        """The precision that the job computes in, `bf16-mixed` or `32`."""
        return self.plan.precision

    @property
    def dataset(self) -> str:
        """The fingerprint of the data, as the options returned it."""
        return self.plan.dataset

    @property
    def start(self) -> str | None:
        """The checkpoint of the previous stage that this run starts from; None: fresh weights."""
        return self.plan.start

    @property
    def resume(self) -> str | None:
        """The checkpoint of this run that this start resumes from; None: from the first step."""
        return self.plan.resume

    @cached_property
    def directory(self) -> RunDirectory:
        """The run directory."""
        return RunDirectory(self.options.output_dir / self.stage.name)

    @property
    def path(self) -> Path:
        """The path of the run directory."""
        return self.directory.path

    def check_directory(self) -> None:
        """Checks that the run directory is still the directory that this job has locked.

        Raises:
            RunDirectoryLostError: The directory was removed, renamed or replaced.
        """
        if self.plan.lock is not None and self.is_main:
            check_still_ours(self.path, self.plan.lock)

    def withdraw(self) -> None:
        """Undoes the start of a training run that was refused before its first checkpoint."""
        if self.is_main and self.trains:
            with contextlib.suppress(OSError):  # the reason of the refusal matters more
                if self.directory.withdraw(self.plan.old_run):
                    self.console.say(f"The old run is {self.path} again.")

    @property
    def trains(self) -> bool:
        """Whether this script trains; otherwise it predicts."""
        return bool(self.plan.identity)

    @property
    def best_by(self) -> str:
        """The criterion for the best checkpoint."""
        return str(self.plan.identity["best_by"])

    @property
    def devices(self) -> "list[torch.device]":
        """The device of each rank of this machine, as this rank numbers the devices."""
        return devices_of_ranks(self.accelerator.name, self.layout.devices)

    @property
    def timeout(self) -> timedelta:
        """How long a rank waits for another rank."""
        return timedelta(seconds=self.options.timeout)

    @property
    def max_steps(self) -> int:
        """The last optimizer step; -1 in prediction."""
        if self.resume and read_manifest(Path(self.resume)).final:
            return self.resumed_step  # the run ended early; only its summary is missing
        return getattr(self.options, "max_steps", -1)

    @property
    def val_interval(self) -> int:
        """The optimizer steps between validations; 1 in prediction."""
        return getattr(self.options, "val_interval", 1)

    @property
    def limit_val_batches(self) -> int | float:
        """The largest number of global batches of a validation; 1.0: all."""
        return getattr(self.options, "limit_val_batches", None) or 1.0

    @property
    def resumed_step(self) -> int:
        """Optimizer steps done before this start."""
        return step_of(Path(self.resume)) if self.resume else 0

    def manifest(self) -> Manifest:
        """Returns a manifest with the entries that all checkpoints of this run share."""
        return Manifest(
            stage=self.stage.name,
            model="",
            dataset=self.dataset,
            step=0,
            run=self.plan.identity,
            versions=installed_versions(),
        )

    # --- What the run adds to a trainer ---------------------------------------------------------

    def logger(self) -> "RunLogger | Literal[False]":
        """Returns the logger of a training run, which writes TensorBoard's files; else False."""
        if not self.trains:
            return False
        from megakit.reporting.tensorboard import RunLogger

        logger = RunLogger(self.path, self.stage.name, self.resumed_step)
        if self.is_main:
            logger.add_hyperparameters(self._hyperparameters())
        return logger

    def callbacks(self) -> "list[pl.Callback]":
        """Returns the callbacks of this run: ordinary callbacks of Lightning.

        `BestValue` is for --best-by and --stop-after; `Reporter` writes metrics.csv, the loggers
        and the progress.
        """
        from megakit.job.finish import remove_incomplete, say_header
        from megakit.training.reporter import Reporter, show_warnings

        resume_collector()
        say_header(self)
        show_warnings(self.console)
        if not self.trains:
            from megakit.training.prediction import PredictionWriter

            remove_incomplete(self)  # of a prediction that was killed
            return [PredictionWriter(partial_path(self.path / "outputs"))]
        from megakit.checkpoints.writer import CheckpointWriter
        from megakit.reporting.metrics import MetricsFile
        from megakit.training.callbacks import BestValue, StopOnSignal, UsedOptions

        options: Any = self.options
        path, file = self.path / METRICS, None
        if self.is_main:
            saved = Path(self.resume, METRICS) if self.resume else None
            file = MetricsFile(path, self.resumed_step, saved, self.check_directory)
        writer = CheckpointWriter(
            self.directory.checkpoints,
            self.manifest(),
            options.save_interval,
            self.best_by,
            copied=[path],
            check_place=self.check_directory,
        )
        is_asked = self.best_by not in ("val_loss", "last") or options.stop_after is not None
        every_project_has = {option.name for option in fields(TrainingOptions)}
        own = {n: value for n, value in vars(options).items() if n not in every_project_has}
        return [
            UsedOptions({} if self.resume else own),
            *([BestValue(writer, options.stop_after)] if is_asked else []),
            Reporter(self.console, self.stage.name, writer, file),
            StopOnSignal(writer, self.console.say),
            writer,
        ]

    def finish(self, trainer: "pl.Trainer", **options: Any) -> Path:
        """Writes the results of a run: summary.json and the table, or the predictions.

        Args:
            trainer: The trainer, which has trained or predicted.
            options: Of `megakit.job.finish.finish_training` or `finish_prediction`.

        Returns:
            The path of the best checkpoint, or of predictions.csv.
        """
        from megakit.job.finish import finish_prediction, finish_training

        return (finish_training if self.trains else finish_prediction)(self, trainer, **options)

    def _hyperparameters(self) -> dict[str, Any]:
        """Returns the settings of a run by which a user compares runs."""
        layout, identity = self.layout, dict(self.plan.identity)
        for name in ("start", CODE, CHANGES):
            identity.pop(name, None)
        return {
            "stage": self.stage.name,
            **identity,
            "micro_batch_size": layout.micro_batch_size,
            "tensor_parallel": layout.tensor,
            "pipeline_parallel": layout.pipeline,
            "data_parallel": layout.data,
        }
