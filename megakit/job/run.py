"""Defines one start of a script, and what it gives to a training: files, callbacks, logger."""

from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, Literal, TypeVar

from megakit.checkpoints.manifest import (
    CHANGES,
    FILES,
    METRICS,
    Manifest,
    installed_versions,
    step_in_name,
)
from megakit.job.console import Console
from megakit.job.layout import Layout
from megakit.job.options import CommonOptions
from megakit.job.run_directory import RunDirectory, Stage
from megakit.runtime.accelerator import Accelerator, devices_of_ranks
from megakit.runtime.deferred_imports import resume_collector

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch

    from megakit.checkpoints.store import CheckpointStore
    from megakit.nemo.tensorboard import RunLogger
    from megakit.training.metrics_csv import MetricsFile

OptionsT_co = TypeVar("OptionsT_co", bound=CommonOptions, covariant=True)


@dataclass(kw_only=True)
class Run(Generic[OptionsT_co]):
    """One start of a script, as `plan` decided it; the script's work function receives it.

    Attributes:
        stage: The stage of the chain.
        options: Options of the command line, with all open choices made.
        layout: How the job's processes share the work.
        accelerator: The device that the job runs on.
        precision: The precision that the job computes in, `bf16-mixed` or `32`.
        dataset: The fingerprint of the data, as the options returned it.
        console: Prints messages for the user.
        start: The checkpoint of the previous stage that this run starts from; None: fresh weights.
        resume: The checkpoint of this run that this start resumes from; None: from the first step.
        identity: Everything that the result depends on; empty for a script that does not train.
        changed: The project's files that were changed since `resume` was saved.
        is_done: Whether the run has already ended.
        only_starts_ranks: Whether this process only starts the ranks of the job.
        ended_at: The step at which the run has ended early, if only its summary is missing.
        work: Multiplications in the product of a micro batch and a square weight of the model.
        is_main: Whether this process writes files and prints messages; one process of a job does.
        began: When the script began, by `time.perf_counter()`.
        lock: The locked file in the run directory; None before the directory exists, and on other
            ranks.
        holder: Who has locked the run directory, as rank 0 reads it; empty on rank 0.
    """

    stage: Stage
    options: OptionsT_co
    layout: Layout
    accelerator: Accelerator
    precision: str
    dataset: str
    console: Console
    start: str | None = None
    resume: str | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    is_done: bool = False
    only_starts_ranks: bool = False
    ended_at: int | None = None
    work: int = 0
    is_main: bool = True
    began: float = 0.0
    lock: IO[str] | None = None
    holder: str = ""

    def __getstate__(self) -> dict[str, Any]:
        """Returns what rank 0 sends to the other ranks, which have a console of their own."""
        given = {one.name: getattr(self.options, one.name) for one in fields(self.options)}
        options = type(self.options)(**given)
        left_out = {"console": None, "lock": None, "is_main": False}
        return vars(self) | left_out | {"options": options, "holder": self.directory.holder()}

    def close(self) -> None:
        """Unlocks the run directory for other processes."""
        if self.lock is not None:
            self.lock.close()

    @property
    def directory(self) -> RunDirectory:
        """The run directory."""
        return RunDirectory(self.options.output_dir / self.stage.name)

    @property
    def path(self) -> Path:
        """The path of the run directory."""
        return self.directory.path

    @property
    def trains(self) -> bool:
        """Whether this script trains; otherwise it predicts."""
        return bool(self.identity)

    @property
    def best_by(self) -> str:
        """The criterion for the best checkpoint."""
        return str(self.identity["best_by"])

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
        steps: int = getattr(self.options, "max_steps", -1)
        return steps if self.ended_at is None else self.ended_at

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
        return step_in_name(Path(self.resume or "")) or 0

    def manifest(self) -> Manifest:
        """Returns a manifest with the entries that all checkpoints of this run share."""
        return Manifest(
            stage=self.stage.name,
            model="",
            dataset=self.dataset,
            step=0,
            run=self.identity,
            versions=installed_versions(),
        )

    def begin(self) -> None:
        """Prints what this run does; from now on, warnings about the project's code are shown."""
        from megakit.job.finish import remove_incomplete, say_header
        from megakit.training.first_look import show_warnings

        resume_collector()
        say_header(self)
        if self.is_main:
            show_warnings(self.console)
        if not self.trains:
            remove_incomplete(self)  # of a prediction that was killed

    def store(self) -> "CheckpointStore":
        """Returns the store of this run's checkpoints, each with a copy of metrics.csv."""
        from megakit.checkpoints.store import CheckpointStore

        return CheckpointStore(
            self.directory.checkpoints,
            self.manifest(),
            self.best_by,
            copied=[self.path / METRICS],
        )

    def metrics_file(self) -> "MetricsFile | None":
        """Returns metrics.csv with the rows of earlier starts; None on ranks that write none."""
        from megakit.training.metrics_csv import MetricsFile

        saved = Path(self.resume, METRICS) if self.resume else None
        return MetricsFile(self.path / METRICS, saved) if self.is_main else None

    def hyperparameters(self) -> dict[str, Any]:
        """Returns what TensorBoard compares runs by: the identity and the layout."""
        left_out = {"start", FILES, CHANGES}
        identity = {k: v for k, v in self.identity.items() if k not in left_out}
        sizes = {f"{name}_parallel": size for name, size in self.layout.parallel.items()}
        sizes["micro_batch_size"] = self.layout.micro_batch_size
        return {"stage": self.stage.name, **identity, **sizes}

    # --- What the run adds to a trainer of Lightning ------------------------------------------

    def logger(self) -> "RunLogger | Literal[False]":
        """Returns the logger of a training run, which writes TensorBoard's files; else False."""
        from megakit.nemo.parts_of_run import logger

        return logger(self)

    def callbacks(self) -> "list[pl.Callback]":
        """Returns the callbacks of this run: ordinary callbacks of Lightning.

        `BestValue` is for --best-by and --stop-after; `Reporter` writes metrics.csv, the loggers
        and the progress.
        """
        from megakit.nemo.parts_of_run import callbacks

        return callbacks(self)

    def finish(self, trainer: "pl.Trainer", **options: Any) -> Path:
        """Writes the results of a run: summary.json and the table, or the predictions.

        Args:
            trainer: The trainer, which has trained or predicted.
            options: Of `megakit.job.finish.finish_training` or `finish_prediction`.

        Returns:
            The path of the best checkpoint, or of predictions.csv.
        """
        from megakit.nemo.parts_of_run import finish

        return finish(self, trainer, **options)
