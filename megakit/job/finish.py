"""Finishes a run: writes what training or prediction leaves behind, and prints the result."""

from __future__ import annotations

import contextlib
import functools
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from megakit.checkpoints.manifest import CHANGES, installed_versions
from megakit.errors import RunDirectoryLostError, UserError
from megakit.job.options import CommonOptions
from megakit.reporting import drawing, figures
from megakit.reporting.figure_style import to_png
from megakit.reporting.files import remove_partial, write_atomically, write_json
from megakit.reporting.metrics import in_words
from megakit.reporting.predictions import Columns, Predictions, write_rows
from megakit.reporting.results import Results
from megakit.runtime.accelerator import has_fast_bfloat16
from megakit.runtime.patching import require_attribute

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from megakit.training import Outputs, StoredOutputs

T = TypeVar("T")
#: A `megakit.job.Run`, which imports this module.
Run: TypeAlias = Any

#: The largest number of pictures whose predictions the console shows.
MOST_ANSWERS = 20
#: Height and width in pixels of the largest image in mistakes.png.
LARGEST_IMAGE = 168
#: The files that show predictions.
FIGURES_AND_REPORT = ("confusion_matrix.png", "mistakes.png", "latent_space.png", "report.html")


def say_header(run: Run) -> None:
    """Prints what the run does, on which device and in which layout."""
    layout, device, precision = run.layout, run.accelerator, run.precision
    is_chosen = run.options.precision == "auto" and precision == "32" and device.name == "cpu"
    if is_chosen and not has_fast_bfloat16():
        precision += " (this CPU only emulates bfloat16)"
    run.console.say(
        f"{run.stage.name}: {run.dataset} on {device.device} ({device.name}), {layout}, {precision}"
    )
    if run.start:
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
        "changes": run.plan.identity.get(CHANGES),
        **dict.fromkeys(("num_samples", "accuracy", "cross_entropy", "per_class_accuracy")),
        "versions": installed_versions(),
    }


def _callback(trainer: Trainer, kind: type[T]) -> T:
    """Returns the last callback of a class: a user's own callbacks come before the run's."""
    found = [each for each in require_attribute(trainer, "callbacks") if isinstance(each, kind)]
    if not found:
        raise UserError(
            f"run.finish: the trainer has no {kind.__name__}. Pass run.callbacks() to nl.Trainer."
        )
    return found[-1]


# --- Training -------------------------------------------------------------------------------------


def finish_training(run: Run, trainer: Trainer, next_verb: str | None = None) -> Path:
    """Writes summary.json, and prints the result.

    Args:
        run: The run.
        trainer: The trainer, after the training.
        next_verb: The `./run` command that uses the result, for a hint on the console.

    Returns:
        The path of the best checkpoint.
    """
    from megakit.checkpoints.writer import CheckpointWriter
    from megakit.training.progress import Reporter

    writer, reporter = _callback(trainer, CheckpointWriter), _callback(trainer, Reporter)
    best = Path(writer.best_model_path)
    if not run.is_main:
        return best
    run.check_directory()
    options, steps = run.options, trainer.global_step
    spans: dict[str, Any] = {
        name: {"first": reporter.first[name], "last": last} for name, last in reporter.last.items()
    }
    rate = steps / max(reporter.stepping_seconds, 1e-9)
    total = time.perf_counter() - run.began
    times = reporter.times(total)
    write_json(
        run.directory.summary,
        _summary(run)
        | {
            "steps": steps,
            "seconds": reporter.seconds,
            "steps_per_second": rate,
            "samples_per_second": rate * run.layout.global_batch_size,
            "times": times,
            "checkpoint": writer.best_model_path,
            "last_checkpoint": writer.last_model_path,
            "train_loss": spans.pop("train_loss", None),
            "val_loss": spans.pop("val_loss", None),
            "metrics": spans or None,
        },
    )
    values = {in_words(name): f"{value:.4f}" for name, value in _sorted_columns(reporter.last)}
    parts = [f"{name.replace('_', '-')} {seconds:.1f}" for name, seconds in times.items()]
    rows = {
        **values,
        "speed": f"{rate:.0f} steps/s",
        "time": f"{total:.1f} s: {', '.join(parts[:3])},\n{', '.join(parts[3:])}",
        "best checkpoint": writer.best_model_path,
        "curves": shlex.join(["./run", "tensorboard", *_not_default(options, logdir="output_dir")]),
    }
    if next_verb is not None:
        # The next stage finds the paths that this run remembers.
        same = _not_default(options, output_dir="output_dir", precision="precision")
        rows["next"] = shlex.join(["./run", next_verb, *same])
    early = ""
    if steps < options.max_steps:
        early = f" It stopped early, after step {steps:,} of {options.max_steps:,}."
    run.console.say(f"{run.stage.name} is done.{early}")
    run.console.table(rows)
    return best


def _sorted_columns(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Sorts values by column of metrics.csv: validation first, and losses before other values."""
    return sorted(
        values.items(), key=lambda item: (item[0][:4] != "val_", not item[0].endswith("_loss"))
    )


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
        run.check_directory()
        remove_partial(run.path)


def finish_prediction(
    run: Run,
    trainer: Trainer,
    sources: Sequence[str] | None = None,
    report: Callable[[Path, Results], None] | None = None,
    rows: Callable[[Outputs], Columns] | None = None,
) -> Path:
    """Writes predictions.csv, summary.json and, for a classifier with labels, figures.

    Rank 0 merges the outputs of all ranks by index, in blocks. The figure of mistakes shows the
    `data` of samples; it is left out if `data` is not a grey picture, or if there are no mistakes.
    If a label is unknown (-1), the function writes no figures, scores or report.

    Args:
        run: The run.
        trainer: The trainer, after the prediction.
        sources: The origin of each sample, for predictions.csv.
        report: Writes report.html from its path and a classifier's results.
        rows: For a model that is no classifier: returns the columns of predictions.csv for a block
            of outputs, by name, with one value for each sample.

    Returns:
        The path of predictions.csv.

    Raises:
        UserError: An output is NaN or infinite, or does not fit a classifier, or `rows` returns
            columns of another shape.
    """
    from megakit.training import PredictionWriter

    path, writer = run.path / "predictions.csv", _callback(trainer, PredictionWriter)
    dataset = require_attribute(trainer, "datamodule").predict_dataloader().dataset
    results = None
    try:
        outputs = writer.outputs()
        if outputs is None:
            return path
        if len(outputs) != len(dataset):
            raise RuntimeError("predictions do not cover every sample exactly once")
        if rows is None:
            results = Results(len(outputs))
            rows = functools.partial(_classify, results)
        write_rows(path, _blocks(run, outputs, rows), sources)
    finally:
        with contextlib.suppress(OSError, RunDirectoryLostError):  # the first error matters more
            remove_incomplete(run)
    scores = results.scores() if results is not None else {"num_samples": len(outputs)}
    speed = {"seconds": writer.seconds, "samples_per_second": len(outputs) / writer.seconds}
    summary = _summary(run) | speed | {"checkpoint": run.start} | scores
    write_json(run.directory.summary, summary)
    table: dict[str, str] = {}
    written: list[str] = []
    if results is not None and sources is not None:
        table |= _answers(sources, results)
    if results is not None and results.is_labelled:
        names = _write_figures(run.path, results, dataset)
        written += names
        table |= {
            "accuracy": f"{scores['accuracy']:.2%}",
            "cross entropy": f"{scores['cross_entropy']:.4f}",
            "figures": f"{', '.join(names)}\nin {run.path}",
        }
        if report is not None:
            report(run.path / "report.html", results)
            table["report"] = str(run.path / "report.html")
            written.append("report.html")
    # An earlier prediction may have drawn more.
    for name in {*FIGURES_AND_REPORT} - {*written}:
        (run.path / name).unlink(missing_ok=True)
    what = "Samples" if results is None else "Images"
    run.console.say(f"{what} predicted: {len(outputs):,}.")
    table["time"] = f"{time.perf_counter() - run.began:.1f} s in all"
    run.console.table(table | {"predictions": str(path)})
    return path


def _blocks(
    run: Run, outputs: StoredOutputs, rows: Callable[[Outputs], Columns]
) -> Iterator[tuple[NDArray[np.int64], Columns]]:
    """Yields the index and the columns of each block; refuses outputs that are NaN or infinite."""
    for block in outputs:
        values = [block.output] if block.latent is None else [block.output, block.latent]
        if not all(np.isfinite(value).all() for value in values):
            raise UserError(
                f"{run.start}: the model's outputs are NaN or infinite. Its weights are damaged or "
                "too large. Use another checkpoint."
            )
        yield block.idx, rows(block)
    run.check_directory()  # directly before predictions.csv gets its name


def _classify(results: Results, block: Outputs) -> Columns:
    """Returns the columns of a classifier, and adds its predictions to the results."""
    remedy = (
        "For a model that is no classifier, pass the columns of predictions.csv: "
        "run.finish(trainer, rows=...)."
    )
    if block.output.ndim != 2 or block.output.shape[1] < 2:
        shape = ", ".join(["B", *map(str, block.output.shape[1:])])
        raise UserError(
            f"predict_step returned 'output' of shape ({shape}), and a classifier returns logits "
            f"(B, classes) of at least two classes. {remedy}"
        )
    if block.label is None:
        raise UserError(
            "predict_step returned no 'label', and this script writes the scores of a classifier. "
            f"Return the labels, int64 (B,), -1 for an unknown label. {remedy}"
        )
    predictions = Predictions.from_logits(block.idx, block.label, block.output, block.latent)
    results.add(predictions)
    return predictions.columns()


def _answers(sources: Sequence[str], results: Results) -> dict[str, str]:
    """Returns a line for each of the first predictions, and the number of further predictions."""
    first = results.shown[np.arange(min(MOST_ANSWERS, len(results.shown)))]
    shown = zip(first.idx, first.prediction, first.probabilities.max(axis=1), strict=True)
    rows = {sources[idx]: f"{answer}, probability {share:.1%}" for idx, answer, share in shown}
    if (more := len(sources) - len(first)) > 0:
        rows["and"] = f"{more:,} more in predictions.csv"
    return rows


def _write_figures(folder: Path, results: Results, dataset: Any) -> list[str]:
    """Draws the figures of predictions for labelled samples; returns the names of the files."""
    drawn = {"confusion_matrix.png": to_png(figures.confusion_matrix(results.confusions))}
    worst = results.mistakes
    images = [np.squeeze(dataset[index]["data"]) for index in worst.idx.tolist()]
    if len({image.shape for image in images}) == 1 and images[0].ndim == 2:
        shown = drawing.shrunk(np.stack(images), LARGEST_IMAGE)
        drawn["mistakes.png"] = drawing.to_png(
            drawing.mistakes(
                drawing.dark_on_light(shown),
                worst.label,
                worst.prediction,
                worst.probabilities.max(axis=1),
                scale=max(1, LARGEST_IMAGE // max(shown.shape[1:])),
                title=f"{len(worst)} of {results.num_mistakes:,} mistakes, "
                "the most confident first",
            )
        )
    latent = results.shown.latent
    if latent is not None and latent.shape[1] > 1:
        drawn["latent_space.png"] = to_png(figures.latent_space(latent, results.shown.label))
    for name, content in drawn.items():
        write_atomically(folder / name, content)
    return list(drawn)
