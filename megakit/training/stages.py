"""Runs a stage: trains or predicts with a model and its data, and writes the results."""

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from nemo import lightning as nl

from megakit.checkpoints.manifest import CHANGES, installed_versions
from megakit.checkpoints.writer import CheckpointWriter
from megakit.errors import RunDirectoryLostError, UserError
from megakit.job.options import CommonOptions, TrainingOptions, flag
from megakit.job.script import Run
from megakit.reporting import drawing, figures
from megakit.reporting.figure_style import to_png
from megakit.reporting.files import partial_path, remove_partial, write_atomically, write_json
from megakit.reporting.metrics import in_words
from megakit.reporting.predictions import Predictions, write_predictions
from megakit.reporting.results import Results
from megakit.runtime.accelerator import has_fast_bfloat16
from megakit.runtime.memory import resume_collector
from megakit.runtime.patching import require_attribute
from megakit.training.prediction import StoredOutputs, predict_to_disk
from megakit.training.progress import Reporter
from megakit.training.strategy_options import StrategyOptions
from megakit.training.trainer import build_trainer, train
from megakit.training.validation import callbacks_of, metrics_of
from megakit.training.views import MakeView

#: The largest number of pictures whose predictions the console shows.
MOST_ANSWERS = 20
#: Height and width in pixels of the largest image in mistakes.png.
LARGEST_IMAGE = 168
#: The files that show predictions.
FIGURES_AND_REPORT = ("confusion_matrix.png", "mistakes.png", "latent_space.png", "report.html")


def train_stage(
    run: Run,
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    make_view: MakeView | None = None,
    next_verb: str | None = None,
    callbacks: Sequence[pl.Callback] = (),
    strategy: StrategyOptions | None = None,
) -> Path:
    """Trains a model from the run's current step to its last step, and writes summary.json.

    Args:
        run: The run's options, plan and directory.
        model: The Lightning module.
        data: The Lightning data module.
        make_view: Converts a validation batch and the model's output to what TensorBoard shows.
        next_verb: The `./run` command that uses the result, for a hint on the console.
        callbacks: Further Lightning callbacks. Each value that a callback logs as `val_<name>` in
            `on_validation_epoch_end` becomes a column of metrics.csv, a curve in TensorBoard and a
            number on the console.
        strategy: Options of the strategy, such as `{"use_distributed_optimizer": True}`; see
            `StrategyOptions`.

    Returns:
        The path of the best checkpoint.

    Raises:
        UserError: The model's config did not receive an option, the data cannot be used, or a
            setting of the strategy or the config would have no effect.
    """
    resume_collector()
    _say_header(run)
    resume = nl.AutoResume(resume_from_path=run.resume) if run.resume else None
    if run.resume is None:
        _check_received(run.options, model, strategy or {})
    further = [*metrics_of(model), *callbacks]
    trainer = build_trainer(run, strategy=strategy, make_view=make_view, callbacks=further)
    train(model=model, data=data, trainer=trainer, resume=resume)
    # `callbacks` may contain other writers of checkpoints; ours is the last callback.
    writer = callbacks_of(trainer, CheckpointWriter)[-1]
    if run.is_main:
        run.check_directory()
        _report_training(run, trainer, writer, next_verb)
    return Path(writer.best_model_path)


def _check_received(options: CommonOptions, model: Any, strategy: Mapping[str, Any]) -> None:
    """Compares the project's own options with the strategy's and the config's values of the names.

    A size that a script accepts and does not pass on would have no effect.

    Raises:
        UserError: The config has another value than the option.
    """
    config = getattr(model, "config", None)
    problems = []
    every_project_has = {option.name for option in dataclasses.fields(TrainingOptions)}
    for option in dataclasses.fields(options):
        if option.name in every_project_has:  # `seed` has other effects
            continue
        value = getattr(options, option.name)
        used = strategy.get(option.name, getattr(config, option.name, value))
        if value is not None and type(used) is type(value) and used != value:
            name = type(config).__name__
            problems.append(
                f"{flag(option.name)} {value}: {name}.{option.name} is {used}, so the option has "
                f"no effect. Pass the option to {name} in the script."
            )
    if problems:
        raise UserError(problems)


def predict_stage(
    run: Run,
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    sources: Sequence[str] | None = None,
    write_report: Callable[[Path, Results], None] | None = None,
    strategy: StrategyOptions | None = None,
) -> Path:
    """Classifies each sample of a data module's prediction set, and writes the results.

    The results are predictions.csv, summary.json and figures. The figure of mistakes shows the
    `data` of samples. This figure is left out if `data` is not a grey picture, or if there are no
    mistakes. If a label is unknown (-1), the function writes no figures, scores or report.

    Memory does not grow with the number of samples: the ranks write their outputs to a hidden
    folder in the run directory, and rank 0 merges the outputs by index.

    Args:
        run: The run's options, plan and directory.
        model: The Lightning module of a classifier.
        data: The Lightning data module.
        sources: The origin of each sample, for predictions.csv.
        write_report: Writes report.html from its path and the results.
        strategy: Options of the strategy, see `StrategyOptions`.

    Returns:
        The path of predictions.csv.
    """
    resume_collector()
    _say_header(run)
    path = run.path / "predictions.csv"
    with _partial_folder(run) as folder:
        began = time.perf_counter()
        trainer = build_trainer(run, strategy=strategy)
        outputs = predict_to_disk(model=model, data=data, trainer=trainer, folder=folder)
        seconds = time.perf_counter() - began
        if outputs is None:
            return path
        if len(outputs) != len(data.predict_dataloader().dataset):
            raise RuntimeError("predictions do not cover every sample exactly once")
        results = Results(len(outputs))
        write_predictions(path, _classify(run, outputs, results), sources)
    scores = results.scores()
    speed = {"seconds": seconds, "samples_per_second": results.num_samples / seconds}
    summary = _summary(run) | speed | {"checkpoint": run.start} | scores
    write_json(run.directory.summary, summary)
    rows = _answers(sources, results) if sources is not None else {}
    written = []
    if results.is_labelled:
        names = _write_figures(run.path, results, data.predict_dataloader().dataset)
        written += names
        rows |= {
            "accuracy": f"{scores['accuracy']:.2%}",
            "cross entropy": f"{scores['cross_entropy']:.4f}",
            "figures": f"{', '.join(names)}\nin {run.path}",
        }
        if write_report is not None:
            write_report(run.path / "report.html", results)
            rows["report"] = str(run.path / "report.html")
            written.append("report.html")
    # An earlier prediction may have drawn more.
    for name in {*FIGURES_AND_REPORT} - {*written}:
        (run.path / name).unlink(missing_ok=True)
    run.console.say(f"Images predicted: {results.num_samples:,}.")
    rows["time"] = f"{time.perf_counter() - run.began:.1f} s in all"
    run.console.table(rows | {"predictions": str(path)})
    return path


def _answers(sources: Sequence[str], results: Results) -> dict[str, str]:
    """Returns a line for each of the first predictions, and the number of further predictions."""
    first = results.shown[np.arange(min(MOST_ANSWERS, len(results.shown)))]
    shown = zip(first.idx, first.prediction, first.probabilities.max(axis=1), strict=True)
    rows = {sources[idx]: f"{answer}, probability {share:.1%}" for idx, answer, share in shown}
    if (more := len(sources) - len(first)) > 0:
        rows["and"] = f"{more:,} more in predictions.csv"
    return rows


@contextlib.contextmanager
def _partial_folder(run: Run) -> Iterator[Path]:
    """Yields the path of a folder for outputs; removes incomplete files before and after."""

    def clean() -> None:
        if run.is_main:
            run.check_directory()
            remove_partial(run.path)

    clean()  # a killed prediction leaves incomplete files
    try:
        yield partial_path(run.path / "outputs")
    finally:
        with contextlib.suppress(OSError, RunDirectoryLostError):  # the first error matters more
            clean()


def _classify(run: Run, outputs: StoredOutputs, results: Results) -> Iterator[Predictions]:
    """Yields the predictions of each block of outputs, and adds them to the results.

    Raises:
        UserError: An output is NaN or infinite, or there are no labels.
    """
    for block in outputs:
        block.check_finite(run.start)
        if block.label is None:
            raise UserError(
                "predict_step returned no 'label', and this script writes the scores of a "
                "classifier. Return the labels, int64 (B,), -1 for an unknown label. For a model "
                "without classes, call megakit.training.predict instead of predict_stage."
            )
        predictions = Predictions.from_logits(block.idx, block.label, block.output, block.latent)
        results.add(predictions)
        yield predictions
    run.check_directory()  # directly before predictions.csv gets its name


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


def _say_header(run: Run) -> None:
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


def _report_training(
    run: Run, trainer: pl.Trainer, writer: CheckpointWriter, next_verb: str | None
) -> None:
    """Writes summary.json, and prints the result."""
    options, steps = run.options, trainer.global_step
    (reporter,) = callbacks_of(trainer, Reporter)
    spans: dict[str, Any] = {
        name: {"first": reporter.first[name], "last": last} for name, last in reporter.last.items()
    }
    rate = steps / max(reporter.stepping_seconds, 1e-9)
    total = time.perf_counter() - run.began
    times = reporter.times(total, require_attribute(trainer, "profiler"))
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
        names = ("output_dir", "precision")
        kept = {name: name for name in names}
        same = _not_default(options, **kept)
        rows["next"] = shlex.join(["./run", next_verb, *same])
    early = ""
    if steps < options.max_steps:
        early = f" It stopped early, after step {steps:,} of {options.max_steps:,}."
    run.console.say(f"{run.stage.name} is done.{early}")
    run.console.table(rows)


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
