"""Runs a stage: trains or predicts with a model and its data, and writes the results."""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from nemo import lightning as nl

from megakit.checkpoints.manifest import CHANGES
from megakit.errors import UserError
from megakit.job.script import Run
from megakit.reporting import drawing, figures
from megakit.reporting.figure_style import to_png
from megakit.reporting.files import write_atomically, write_json
from megakit.reporting.metrics import in_words
from megakit.reporting.predictions import Predictions, write_predictions
from megakit.runtime.memory import resume_collector
from megakit.runtime.versions import installed_versions
from megakit.training.progress import DataClock, Reporter
from megakit.training.trainer import build_trainer, predict, train, writer_of
from megakit.training.validation import metrics_of
from megakit.training.views import MakeView


def train_stage(
    run: Run,
    model: Any,
    data: Any,
    view: MakeView | None = None,
    next_verb: str | None = None,
    callbacks: Sequence[pl.Callback] = (),
) -> Path:
    """Trains a model from the run's current step to its last step, and writes summary.json.

    Args:
        run: The run's options, plan and directory.
        model: The Lightning module.
        data: The Lightning data module.
        view: Converts a validation batch and the model's output to what TensorBoard shows.
        next_verb: The `./run` command that uses the result, for a hint on the console.
        callbacks: Further Lightning callbacks. Each value that a callback logs as `val_<name>` in
            `on_validation_epoch_end` becomes a column of metrics.csv, a curve in TensorBoard and a
            number on the console.

    Returns:
        The path of the best checkpoint.
    """
    resume_collector()
    _say_header(run)
    trainer = build_trainer(run, view=view, callbacks=[*metrics_of(model), *callbacks])
    resume = nl.AutoResume(resume_from_path=run.plan.resume) if run.plan.resume else None
    try:
        train(model=model, data=data, trainer=trainer, resume=resume)
    except UserError:
        if run.is_main:
            run.directory.withdraw_identity()
        raise
    best = Path(writer_of(trainer).best_model_path)
    if run.is_main:
        run.check_directory()
        _write_training_summary(run, trainer)
        _say_result(run, best, next_verb)
    return best


def predict_stage(
    run: Run,
    model: Any,
    data: Any,
    sources: Sequence[str] | None = None,
    write_report: Callable[[Path, Predictions], None] | None = None,
) -> Path:
    """Classifies each sample of a data module's prediction set, and writes the results.

    The results are predictions.csv, summary.json and figures. The figure of mistakes shows the
    `data` of samples. This figure is left out if `data` is not a grey picture, or if there are no
    mistakes. If a label is unknown (-1), the function writes no figures, scores or report.

    Args:
        run: The run's options, plan and directory.
        model: The Lightning module of a classifier.
        data: The Lightning data module.
        sources: The origin of each sample, for predictions.csv.
        write_report: Writes report.html from its path and the predictions.

    Returns:
        The path of predictions.csv.
    """
    resume_collector()
    _say_header(run)
    began = time.perf_counter()
    outputs = predict(model=model, data=data, trainer=build_trainer(run))
    seconds = time.perf_counter() - began
    path = run.path / "predictions.csv"
    if outputs is None:
        return path
    outputs.check_finite(run.plan.start)
    predictions = Predictions.from_logits(
        outputs.idx, outputs.label, outputs.output, outputs.latent
    )
    if len(np.unique(predictions.idx)) != len(data.predict_dataloader().dataset):
        raise RuntimeError("predictions do not cover every sample exactly once")
    run.check_directory()
    # These files show an earlier prediction, and this prediction may not replace each of them.
    for name in ("confusion_matrix.png", "mistakes.png", "latent_space.png", "report.html"):
        (run.path / name).unlink(missing_ok=True)
    write_predictions(path, predictions, sources)
    scores = predictions.scores()
    write_json(
        run.directory.summary,
        _summary(run)
        | {
            "seconds": seconds,
            "samples_per_second": scores["num_samples"] / seconds,
            "checkpoint": run.plan.start,
        }
        | scores,
    )
    rows = _answers(predictions, sources) if sources is not None else {}
    if predictions.is_labelled:
        names = _write_figures(run.path, predictions, data.predict_dataloader().dataset)
        rows |= {
            "accuracy": f"{scores['accuracy']:.2%}",
            "cross entropy": f"{scores['cross_entropy']:.4f}",
            "figures": f"{', '.join(names)}\nin {run.path}",
        }
        if write_report is not None:
            write_report(run.path / "report.html", predictions)
            rows["report"] = str(run.path / "report.html")
    run.console.say(f"Images predicted: {scores['num_samples']:,}.")
    run.console.table(
        {
            **rows,
            "time": f"{time.perf_counter() - run.began:.1f} s in all",
            "predictions": str(path),
        }
    )
    return path


def _answers(predictions: Predictions, sources: Sequence[str], most: int = 10) -> dict[str, str]:
    """Returns prediction and probability by source, or nothing for more than `most` samples."""
    if len(sources) > most:
        return {}
    shares = predictions.probabilities.max(axis=1)
    rows = zip(sources, predictions.prediction, shares, strict=True)
    return {source: f"{prediction}, {share:.1%} sure" for source, prediction, share in rows}


def _write_figures(folder: Path, predictions: Predictions, dataset: Any) -> list[str]:
    """Draws the figures of predictions for labelled samples; returns the names of the files."""
    labels, predicted = predictions.label, predictions.prediction
    num_classes = predictions.probabilities.shape[1]
    matrix = figures.confusion_matrix(labels, predicted, num_classes)
    drawn = {"confusion_matrix.png": to_png(matrix)}
    surest = figures.most_confident_mistakes(labels, predictions.probabilities)
    images = [np.squeeze(dataset[index]["data"]) for index in predictions.idx[surest].tolist()]
    if len({image.shape for image in images}) == 1 and images[0].ndim == 2:
        drawn["mistakes.png"] = drawing.to_png(
            drawing.mistakes(
                drawing.dark_on_light(np.stack(images)),
                labels[surest],
                predicted[surest],
                predictions.probabilities[surest].max(axis=1),
                scale=max(1, 168 // len(images[0])),
                title=f"{len(surest)} of {(labels != predicted).sum():,} mistakes, "
                "the most confident first",
            )
        )
    if predictions.latent is not None and predictions.latent.shape[1] > 1:
        drawn["latent_space.png"] = to_png(figures.latent_space(predictions.latent, labels))
    for name, content in drawn.items():
        write_atomically(folder / name, content)
    return list(drawn)


def _say_header(run: Run) -> None:
    layout, device = run.layout, run.accelerator
    run.console.say(
        f"{run.stage.name}: {run.plan.dataset} on {device.device} ({device.name}), {layout}, "
        f"{run.options.precision}"
    )
    if run.plan.start:
        run.console.say(f"Starting from {run.plan.start}.")


def _summary(run: Run) -> dict[str, Any]:
    """Returns the entries of summary.json that all stages share. Unused entries are None."""
    layout = run.layout
    return {
        "stage": run.stage.name,
        "dataset": run.plan.dataset,
        "accelerator": run.accelerator.name,
        "device": run.accelerator.device,
        "precision": run.options.precision,
        "parallel": {
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "data": layout.data,
        },
        "seed": getattr(run.options, "seed", None),
        "steps": None,
        "seconds": None,
        "steps_per_second": None,
        "samples_per_second": None,
        "times": None,
        "train_loss": None,
        "val_loss": None,
        "metrics": None,
        "checkpoint": None,
        "last_checkpoint": None,
        "changes": run.plan.identity.get(CHANGES),
        "num_samples": None,
        "accuracy": None,
        "cross_entropy": None,
        "per_class_accuracy": None,
        "versions": installed_versions(),
    }


def _write_training_summary(run: Run, trainer: Any) -> None:
    reporter = next(callback for callback in trainer.callbacks if isinstance(callback, Reporter))
    writer = writer_of(trainer)
    spans = {
        name: {"first": reporter.first[name], "last": last} for name, last in reporter.last.items()
    }
    steps = trainer.global_step
    rate = steps / max(reporter.stepping_seconds, 1e-9)
    assert isinstance(trainer.profiler, DataClock)
    times = reporter.times(time.perf_counter() - run.began, trainer.profiler)
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
    run.results = {"values": reporter.last, "steps": steps, "rate": rate, "times": times}


def _say_result(run: Run, best: Path, next_verb: str | None) -> None:
    results, options = run.results, run.options
    total = sum(results["times"].values())
    times = [f"{name.replace('_', '-')} {part:.1f}" for name, part in results["times"].items()]
    values = {in_words(name): f"{value:.4f}" for name, value in _sorted_columns(results["values"])}
    rows = {
        **values,
        "speed": f"{results['rate']:.0f} steps/s",
        "time": f"{total:.1f} s: {', '.join(times[:3])},\n{', '.join(times[3:])}",
        "best checkpoint": str(best),
        "curves": shlex.join(["./run", "tensorboard", *_not_default(options, logdir="output_dir")]),
    }
    if next_verb is not None:
        same = _not_default(options, output_dir="output_dir", data_dir="data_dir")
        rows["next"] = shlex.join(["./run", next_verb, *same])
    early = ""
    if results["steps"] < options.max_steps:
        early = f" It stopped early, after step {results['steps']:,} of {options.max_steps:,}."
    run.console.say(f"{run.stage.name} is done.{early}")
    run.console.table(rows)


def _sorted_columns(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Sorts values by column of metrics.csv: validation first, and losses before other values."""
    return sorted(
        values.items(), key=lambda item: (item[0][:4] != "val_", not item[0].endswith("_loss"))
    )


def _not_default(options: Any, **names: str) -> list[str]:
    """Returns the flags, with values, of options that differ from their defaults.

    Args:
        options: The options of the run.
        names: The name of the option for each flag.
    """
    fields = type(options).__dataclass_fields__
    return [
        part
        for flag, name in names.items()
        if name in fields and getattr(options, name) != fields[name].default
        for part in (f"--{flag.replace('_', '-')}", str(getattr(options, name)))
    ]
