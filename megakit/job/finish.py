"""Finishes a run: writes what training or prediction leaves behind, and prints the result."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from megakit.checkpoints.manifest import CHANGES, METRICS, installed_versions
from megakit.errors import UserError
from megakit.job.options import CommonOptions
from megakit.runtime.accelerator import has_fast_bfloat16
from megakit.runtime.atomic_files import remove_partial, write_json
from megakit.training.metrics_csv import first_and_last, in_words, read_metrics
from megakit.training.predicted_classes import Predictions, classify
from megakit.training.predictions_csv import check_columns, columns_of, write_columns

if TYPE_CHECKING:
    from megakit.training import Outputs, OutputsOfRanks

#: A `megakit.job.Run`, which imports this module.
Run: TypeAlias = Any


def say_header(run: Run) -> None:
    """Prints what the run does, on which device, in which layout, and from which checkpoint."""
    layout, device, precision = run.layout, run.accelerator, run.precision
    is_chosen = run.options.precision == "auto" and precision == "32" and device.name == "cpu"
    if is_chosen and not has_fast_bfloat16():
        precision += " (this CPU only emulates bfloat16)"
    run.console.say(
        f"{run.stage.name}: {run.dataset} on {device.device} ({device.name}), {layout}, {precision}"
    )
    if device.remark:
        run.console.say(device.remark)
    if run.resume:
        run.console.say(f"Resuming from {run.resume}, step {run.resumed_step}.")
        if run.changed:
            run.console.say(f"Changed since it was saved: {', '.join(run.changed)}.")
    elif run.start:
        run.console.say(f"Starting from {run.start}.")


def _summary(run: Run) -> dict[str, Any]:
    """Returns the entries of summary.json that all stages share. Unused entries are None."""
    layout, device = run.layout, run.accelerator
    return {
        "stage": run.stage.name,
        "dataset": run.dataset,
        "accelerator": device.name,
        "device": device.device,
        "precision": run.precision,
        "parallel": {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data},
        "seed": getattr(run.options, "seed", None),
        **dict.fromkeys(("steps", "seconds", "steps_per_second", "samples_per_second", "times")),
        **dict.fromkeys(("train_loss", "val_loss", "metrics", "checkpoint", "last_checkpoint")),
        "changes": run.identity.get(CHANGES),
        **dict.fromkeys(("num_samples", "accuracy", "cross_entropy", "per_class_accuracy")),
        "versions": installed_versions(),
    }


# --- Training -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training has done.

    Attributes:
        steps: Completed optimizer steps.
        seconds: Seconds from the first step to the last step, over all starts of the run.
        stepping_seconds: The part of them without validations and saves.
        times: Seconds of each activity in this start of the run: `start_up`, `data`, `training`,
            `validation`, `checkpoints`.
        best: The best checkpoint.
        last: The newest checkpoint.
        more: Further entries of summary.json.
    """

    steps: int
    seconds: float
    stepping_seconds: float
    times: dict[str, float]
    best: str
    last: str
    more: dict[str, Any] = field(default_factory=dict)


def finish_training(run: Run, done: Trained, next_verb: str | None = None) -> Path:
    """Writes summary.json, and prints the result.

    Args:
        run: The run.
        done: What the training has done.
        next_verb: The `./run` command that uses the result, for a hint on the console.

    Returns:
        The path of the best checkpoint.
    """
    if not run.is_main:
        return Path(done.best)
    options, times = run.options, done.times
    spans: dict[str, Any] = dict(first_and_last(read_metrics(run.path / METRICS)))
    last = {name: span["last"] for name, span in spans.items()}
    rate = done.steps / max(done.stepping_seconds, 1e-9)
    write_json(
        run.directory.summary,
        _summary(run)
        | {
            "steps": done.steps,
            "seconds": done.seconds,
            "steps_per_second": rate,
            "samples_per_second": rate * run.layout.global_batch_size,
            "times": times,
            "checkpoint": done.best,
            "last_checkpoint": done.last,
            "train_loss": spans.pop("train_loss", None),
            "val_loss": spans.pop("val_loss", None),
            "metrics": spans or None,
        }
        | done.more,
    )
    # Validation first, and losses before other values.
    by_column = sorted(last, key=lambda name: (name[:4] != "val_", name[-5:] != "_loss"))
    parts = [f"{name.replace('_', '-')} {seconds:.1f}" for name, seconds in times.items()]
    rows = {
        **{in_words(name): f"{last[name]:.4f}" for name in by_column},
        "speed": f"{rate:.0f} steps/s",
        "time": f"{sum(times.values()):.1f} s: {', '.join(parts[:3])},\n{', '.join(parts[3:])}",
        "best checkpoint": done.best,
        "curves": shlex.join(["./run", "tensorboard", *_not_default(options, logdir="output_dir")]),
    }
    if next_verb is not None:
        same = _not_default(
            options, output_dir="output_dir", precision="precision", data_dir="data_dir"
        )
        rows["next"] = shlex.join(["./run", next_verb, *same])
    early = ""
    if done.steps < options.max_steps:
        early = f" It stopped early, after step {done.steps:,} of {options.max_steps:,}."
    run.console.say(f"{run.stage.name} is done.{early}")
    run.console.table(rows)
    return Path(done.best)


def _not_default(options: CommonOptions, **names: str) -> list[str]:
    """Returns the flags with values of options, named by flag, that differ from their defaults."""
    fields = type(options).__dataclass_fields__
    return [
        part
        for flag, name in names.items()
        if name in fields and getattr(options, name) != fields[name].default
        for part in (f"--{flag.replace('_', '-')}", str(getattr(options, name)))
    ]


# --- Prediction -----------------------------------------------------------------------------------


def remove_incomplete(run: Run) -> None:
    """Removes incomplete files from the run directory; a killed prediction leaves some."""
    if run.is_main:
        remove_partial(run.path)


def finish_prediction(
    run: Run,
    collected: OutputsOfRanks,
    num_samples: int,
    seconds: float,
    *,
    sources: Sequence[str] | None = None,
    show: Callable[[Path, Predictions], Mapping[str, str]] | None = None,
    rows: Callable[[Outputs], Mapping[str, Any]] | None = None,
    scores: Callable[[Outputs], Mapping[str, float]] | None = None,
) -> Path:
    """Writes predictions.csv and summary.json, and prints the result.

    Args:
        run: The run.
        collected: The outputs of this rank.
        num_samples: The number of samples that were to be predicted.
        seconds: Seconds that the prediction took.
        sources: The origin of each sample, for predictions.csv.
        show: Called on rank 0 with the run directory and a classifier's predictions, when both
            files are written. It may write further files, and returns lines for the console.
        rows: For a model that is no classifier: returns the columns of predictions.csv by name,
            with one value for each sample; called once on rank 0.
        scores: Returns numbers by name, for summary.json and the console; called once on rank 0.

    Returns:
        The path of predictions.csv.

    Raises:
        UserError: An output is NaN or infinite, or does not fit a classifier, or `rows` returns
            columns of another shape, or `scores` uses a name of summary.json.
    """
    path, predictions = run.path / "predictions.csv", None
    try:
        outputs = collected.join()
        if outputs is None:
            return path
        _check_outputs(run, num_samples, outputs)
        if rows is None:
            predictions = classify(outputs)
            columns: Mapping[str, Any] = columns_of(predictions)
        else:
            columns = check_columns(rows(outputs), num_samples)
        origins = {} if sources is None else {"source": sources}
        write_columns(path, {"idx": outputs.idx, **origins, **columns})
    finally:
        with contextlib.suppress(OSError):  # the first error matters more
            remove_incomplete(run)
    summary = _summary(run) | {
        "seconds": seconds,
        "samples_per_second": num_samples / seconds,
        "checkpoint": run.start,
        "num_samples": num_samples,
        **({} if predictions is None else predictions.scores()),
    }
    own = {name: float(value) for name, value in (scores(outputs) if scores else {}).items()}
    if taken := sorted({*summary, "time", "predictions"} & own.keys()):
        raise UserError(
            f"scores returned {', '.join(taken)}, which megakit writes itself. Use another name."
        )
    write_json(run.directory.summary, summary | own)
    table: dict[str, str] = {}
    if summary["accuracy"] is not None:
        table["accuracy"] = f"{summary['accuracy']:.2%}"
        table["cross entropy"] = f"{summary['cross_entropy']:.4f}"
    if predictions is not None and show:
        table |= show(run.path, predictions)
    table |= {name.replace("_", " "): f"{value:.4f}" for name, value in own.items()}
    run.console.say(f"Samples predicted: {num_samples:,}.")
    if predictions is None and run.precision == "bf16-mixed":
        run.console.say("bfloat16 rounds outputs by up to 0.4%. --precision 32 gives float32.")
    table["time"] = f"{time.perf_counter() - run.began:.1f} s in all"
    run.console.table(table | {"predictions": str(path)})
    return path


def _check_outputs(run: Run, num_samples: int, outputs: Outputs) -> None:
    """Checks that each sample was predicted once.

    Raises:
        RuntimeError: A sample is missing, or two have the same index.
        UserError: An output is NaN or infinite.
    """
    if not len(outputs.idx) == len(np.unique(outputs.idx)) == num_samples:
        raise RuntimeError("predictions do not cover every sample exactly once")
    values = [outputs.output] if outputs.latent is None else [outputs.output, outputs.latent]
    if not all(np.isfinite(value).all() for value in values):
        raise UserError(
            f"{run.start}: the model's outputs are NaN or infinite. Its weights are damaged or "
            "too large. Use another checkpoint."
        )
