"""A stage's work from a model and its data: train or predict, then write down what came of it."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from nemo import lightning as nl

from megakit.models.loading import num_parameters
from megakit.reporting.files import write_json
from megakit.reporting.metrics import read_metrics
from megakit.reporting.predictions import Predictions, write_predictions
from megakit.runtime.memory import resume_collector
from megakit.runtime.versions import installed_versions
from megakit.training.callbacks import Reporter
from megakit.training.script import Run
from megakit.training.trainer import build_trainer, predict, train


def train_stage(run: Run, model: Any, data: Any) -> Path:
    """Trains a model from where the run stands to its last step, and writes summary.json.

    Args:
        run: What is to be done, and where.
        model: The Lightning module.
        data: Its data module.

    Returns:
        The best checkpoint.
    """
    resume_collector()
    _say_header(run, f"{run.options.max_steps} steps of {run.layout.global_batch_size}")
    trainer = build_trainer(run)
    resume = nl.AutoResume(resume_from_path=run.plan.resume) if run.plan.resume else None
    train(model=model, data=data, trainer=trainer, resume=resume)
    best = Path(trainer.checkpoint_callback.best_model_path)
    if run.is_main:
        _write_training_summary(run, trainer)
        _say_result(run, best)
    return best


def predict_stage(run: Run, model: Any, data: Any) -> Path:
    """Classifies every sample of a data module's prediction set; writes predictions and summary.

    Args:
        run: What is to be done, and where.
        model: The Lightning module of a classifier.
        data: Its data module.

    Returns:
        The path of predictions.csv.
    """
    resume_collector()
    _say_header(run, "every sample once")
    began = time.perf_counter()
    outputs = predict(model=model, data=data, trainer=build_trainer(run))
    seconds = time.perf_counter() - began
    path = run.path / "predictions.csv"
    if outputs is None:
        return path
    predictions = Predictions.from_logits(outputs.idx, outputs.label, outputs.output)
    if len(np.unique(predictions.idx)) != len(data.predict_dataloader().dataset):
        raise RuntimeError("predictions do not cover every sample exactly once")
    write_predictions(path, predictions)
    scores = predictions.scores()
    write_json(
        run.path / "summary.json",
        _summary(run)
        | {
            "seconds": seconds,
            "samples_per_second": scores["num_samples"] / seconds,
            "checkpoint": run.plan.start,
        }
        | scores,
    )
    run.console.say(f"{scores['num_samples']:,} images predicted.")
    run.console.table(
        {
            "accuracy": f"{scores['accuracy']:.2%}",
            "cross entropy": f"{scores['cross_entropy']:.4f}",
            "time": f"{time.perf_counter() - run.began:.1f} s in all",
            "predictions": str(path),
        }
    )
    return path


def _say_header(run: Run, work: str) -> None:
    layout, device = run.layout, run.accelerator
    run.console.say(
        f"{run.stage.name}: {run.plan.dataset} on {device.device} ({device.name}), {layout}, "
        f"{run.options.precision}, {work}"
    )
    if run.plan.start:
        run.console.say(f"Starting from {run.plan.start}.")


def _summary(run: Run) -> dict[str, Any]:
    """The part of summary.json that all stages share; what does not apply stays null."""
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
        "train_loss": None,
        "val_loss": None,
        "checkpoint": None,
        "last_checkpoint": None,
        "num_samples": None,
        "accuracy": None,
        "cross_entropy": None,
        "per_class_accuracy": None,
        "versions": installed_versions(),
    }


def _write_training_summary(run: Run, trainer: Any) -> None:
    reporter = next(callback for callback in trainer.callbacks if isinstance(callback, Reporter))
    writer = trainer.checkpoint_callback
    rows = read_metrics(run.path / "metrics.csv")
    losses = {
        name: [value for row in rows if (value := getattr(row, name)) is not None]
        for name in ("train_loss", "val_loss")
    }
    stepping = max(reporter.seconds - reporter.validation_seconds - writer.seconds, 1e-9)
    rate = run.options.max_steps / stepping
    write_json(
        run.path / "summary.json",
        _summary(run)
        | {
            "steps": run.options.max_steps,
            "seconds": reporter.seconds,
            "steps_per_second": rate,
            "samples_per_second": rate * run.layout.global_batch_size,
            "checkpoint": writer.best_model_path,
            "last_checkpoint": writer.last_model_path,
        }
        | {
            name: {"first": values[0], "last": values[-1]} if values else None
            for name, values in losses.items()
        },
    )
    run.results = {name: values[-1] for name, values in losses.items() if values}
    run.results |= {"rate": rate, "parameters": num_parameters(trainer.lightning_module)}


def _say_result(run: Run, best: Path) -> None:
    results = run.results
    run.console.say(f"{run.stage.name} is done.")
    rows = {
        "training loss": f"{results['train_loss']:.4f}",
        "parameters": f"{results['parameters']:,} on this process",
        "speed": f"{results['rate']:.0f} steps/s",
        "time": f"{time.perf_counter() - run.began:.1f} s in all",
        "best checkpoint": str(best),
        "curves": f"./run tensorboard --logdir {run.options.output_dir}",
    }
    if "val_loss" in results:
        rows = {"validation loss": f"{results['val_loss']:.4f}", **rows}
    run.console.table(rows)
