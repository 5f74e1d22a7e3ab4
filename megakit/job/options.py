"""Options of the scripts: dataclasses, whose fields are the options, with a docstring below each.

This module does not import torch, so `--help` and refusals are quick.
"""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from megakit.errors import brief
from megakit.job.option_types import (
    INT32_MAX,
    BatchSize,
    Count,
    LearningRate,
    Range,
    Seed,
    broken_rules,
)


@dataclass(kw_only=True)
class CommonOptions:
    """Where and how a script runs."""

    output_dir: Path = Path("runs")
    """Folder that contains the runs."""

    precision: Literal["auto", "bf16-mixed", "32"] = "auto"
    """bf16-mixed computes in bfloat16 and keeps float32 weights; 32 uses only float32. auto uses
    the precision of the resumed run, else bf16-mixed, or 32 on a CPU that emulates bfloat16."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Device to run on; auto uses a GPU if it works."""

    devices: Annotated[int | None, Range(least=1, most=1024)] = None
    """Processes per machine, one per GPU; 1 unless torchrun or srun sets the number."""

    num_nodes: Annotated[int | None, Range(least=1, most=100_000)] = None
    """Number of machines; 1 unless torchrun or srun sets the number."""

    tensor_parallel: Annotated[int, Range(least=1, most=2**24)] = 1
    """Ranks that split each layer."""

    pipeline_parallel: Annotated[int, Range(least=1, most=2**24)] = 1
    """Pipeline stages that split the layers; the remaining ranks are data parallel."""

    micro_batch_size: Annotated[int | None, Range(least=1, most=2**24)] = None
    """Samples per rank and forward pass; by default as many as were fastest in measurements."""

    num_workers: Annotated[int, Range(least=0, most=256)] = 0
    """Data loader workers per rank; they prefetch batches."""

    timeout: Annotated[int, Range(least=1, most=7 * 24 * 3600)] = 600
    """Seconds a rank may wait for another rank before the job fails."""

    verbose: bool = False
    """Show the frameworks' log on the terminal instead of writing it to log.txt."""

    #: A run may be resumed with other values of these options. The value of every other option is a
    #: part of the run's identity, except for paths: there, the fingerprint of the data counts.
    resumable_options: ClassVar[frozenset[str]] = frozenset(
        (
            *("accelerator", "devices", "num_nodes", "tensor_parallel", "pipeline_parallel"),
            *("micro_batch_size", "num_workers", "timeout", "verbose", "checkpoint"),
            *("val_interval", "save_interval", "fresh"),
        )
    )
    largest_micro_batch: ClassVar[int] = 1024
    #: For `fingerprint`: the data of the start checkpoint, and of the run that may be resumed. The
    #: plan sets these; they are no options.
    start_dataset: ClassVar[str | None] = None
    run_dataset: ClassVar[str | None] = None

    def fingerprint(self) -> str:
        """Checks that the data is usable, and returns what identifies its content.

        A script of your own overrides this method. Two runs on data with equal fingerprints count
        as runs on the same data. The method is called once for each job, before the ranks load the
        data, so it may also download the data, or set options, on this copy of them.

        Raises:
            UserError: The data is missing or damaged.
        """
        raise NotImplementedError(f"{type(self).__name__}.fingerprint")

    def say(self, line: str) -> None:
        """Prints a line for the user, from `fingerprint`."""
        print(line, file=sys.stderr)

    def run_name(self, stage: str) -> str:
        """Returns the name of the run directory, by default that of the stage."""
        return stage

    def problems(self) -> list[str]:
        """Returns one message per option with an invalid value."""
        return broken_rules(self)


@dataclass(kw_only=True)
class TrainingOptions(CommonOptions):
    """Length, learning rate, validation and checkpoints of a training run."""

    max_steps: Count = 1000
    """Optimizer steps to train for."""

    global_batch_size: BatchSize = 256
    """Samples per optimizer step over all ranks, the same for every layout."""

    lr: LearningRate = 1e-3
    """Peak learning rate, between a warm-up and a cosine decay to zero."""

    seed: Seed = 42
    """Seed of initial weights, the order of samples and random operations."""

    val_interval: Count = 250
    """Validate every N steps, and after the last step."""

    save_interval: Count = 250
    """Save a checkpoint every N steps, and after the last step. Only the best and the last are
    kept."""

    limit_val_batches: Annotated[int | None, Range(least=1, most=INT32_MAX)] = None
    """Validate on the first N global batches; by default on all validation data."""

    best_by: str = "val_loss"
    """Column of metrics.csv that selects the best checkpoint, in fine-tuning also val_accuracy.
    last: use the last checkpoint."""

    stop_after: Annotated[int | None, Range(least=1, most=INT32_MAX)] = None
    """Stop after N validations in a row without a better value of --best-by; by default never.
    With N, each better value also saves a checkpoint."""

    fresh: bool = False
    """Start over; the old run is kept under another name."""

    def identity(self) -> dict[str, Any]:
        """Returns the options that the result depends on, by name."""
        left_out = self.resumable_options
        if self.stop_after is not None:  # the last step then depends on when the run validates
            left_out -= {"val_interval"}
        kinds = get_type_hints(type(self))
        names = sorted({field.name for field in fields(self)} - left_out)
        return {
            name: getattr(self, name) for name in names if kinds[name] not in (Path, Path | None)
        }

    def selects_by(self) -> str:
        """Returns what selects the best checkpoint: a column of metrics.csv, or `last`."""
        return self.best_by

    def problems(self) -> list[str]:
        """Returns the problems of single options, and of `--best-by` with `--stop-after`."""
        found = super().problems()
        by, given = self.selects_by(), brief(self.best_by)
        if self.best_by != "last" and not self.best_by.startswith("val_"):
            found.append(
                f"--best-by {given}: has to be last, or a column of metrics.csv that begins with "
                "val_, for example val_loss."
            )
        elif by == "last" and (self.best_by not in ("last", "val_loss") or self.stop_after):
            found.append(
                f"--best-by {given}, --stop-after {self.stop_after}: this run uses its last "
                "checkpoint, so no validation is better than another. Leave both options out."
            )
        return found
