"""Gives a trainer of Lightning what a run adds: logger and callbacks; writes what it has done."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import lightning.pytorch as pl

from megakit.errors import UserError
from megakit.job.finish import Run, Trained, finish_prediction, finish_training
from megakit.nemo.callbacks import BestValue, StopOnSignal
from megakit.nemo.prediction import PredictionWriter
from megakit.nemo.reporter import Reporter
from megakit.nemo.writer import CheckpointWriter
from megakit.runtime.atomic_files import partial_path
from megakit.runtime.patching import require_attribute

if TYPE_CHECKING:
    from megakit.nemo.tensorboard import RunLogger

T = TypeVar("T")


def logger(run: Run) -> "RunLogger | Literal[False]":
    """Returns the logger of a training run, which writes TensorBoard's files; else False."""
    if not run.trains:
        return False
    from megakit.nemo.tensorboard import RunLogger

    logger = RunLogger(run.path, run.stage.name, run.resumed_step)
    if run.is_main:
        logger.add_hyperparameters(run.hyperparameters())
    return logger


def callbacks(run: Run) -> list[pl.Callback]:
    """Returns the callbacks of a run."""
    run.begin()
    if not run.trains:
        return [PredictionWriter(partial_path(run.path / "outputs"))]
    writer = CheckpointWriter(run.store(), run.options.save_interval)
    is_asked = run.best_by not in ("val_loss", "last") or run.options.stop_after is not None
    return [
        *([BestValue(writer, run.options.stop_after)] if is_asked else []),
        Reporter(run.console, run.stage.name, writer, run.metrics_file()),
        StopOnSignal(writer, run.console.say),
        writer,
    ]


def finish(run: Run, trainer: pl.Trainer, **options: Any) -> Path:
    """Writes the results of a run; returns the path of the best checkpoint, or of the predictions.

    Args:
        run: The run.
        trainer: The trainer, which has trained or predicted.
        options: Of `finish_training` or `finish_prediction`.
    """
    if not run.trains:
        predictions = _callback(trainer, PredictionWriter)
        dataset = require_attribute(trainer, "datamodule").predict_dataloader().dataset
        return finish_prediction(
            run, predictions.collected, len(dataset), predictions.seconds, **options
        )
    writer, reporter = _callback(trainer, CheckpointWriter), _callback(trainer, Reporter)
    normalizes = getattr(trainer.strategy, "has_batch_norm", False)
    done = Trained(
        steps=trainer.global_step,
        seconds=reporter.seconds,
        stepping_seconds=reporter.stepping_seconds,
        times=reporter.times(time.perf_counter() - run.began),
        best=writer.best_model_path,
        last=writer.last_model_path,
        more={"batch_norm_samples": run.layout.micro_batch_size} if normalizes else {},
    )
    return finish_training(run, done, **options)


def _callback(trainer: pl.Trainer, kind: type[T]) -> T:
    """Returns the last callback of a class: a user's own callbacks come before the run's."""
    found = [each for each in require_attribute(trainer, "callbacks") if isinstance(each, kind)]
    if not found:
        raise UserError(
            f"run.finish: the trainer has no {kind.__name__}. Pass run.callbacks() to nl.Trainer."
        )
    return found[-1]
