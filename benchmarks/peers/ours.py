"""The training by `model_pretrain.py` as a user starts it, its steps timed."""

import functools
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import model_pretrain
from megakit.job import Run, run_script
from peers.job import Clock, Job


def train(job: Job, clock: Clock) -> None:
    """Trains, validates and saves after the last step; does not return."""
    options: dict[str, Any] = {
        "data-dir": job.data_dir,
        "dataset": job.dataset,
        "output-dir": tempfile.mkdtemp(prefix="megakit-peer-"),
        "accelerator": job.device,
        "max-steps": job.steps,
        "global-batch-size": job.batch_size,
        "micro-batch-size": job.batch_size,
        "precision": job.precision,
        "lr": job.lr,
        "corruption": 0,
        "seed": job.seed,
        # Validation and saves come after the last step's end, which is when the clock stops.
        "val-interval": job.steps,
        "save-interval": job.steps,
    }
    sys.argv[1:] = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    work = functools.partial(timed, job=job, clock=clock)
    run_script(model_pretrain.PRETRAIN, model_pretrain.PretrainOptions, work)


def timed(run: Run, job: Job, clock: Clock) -> Path:
    """What the script does, with a clock that looks at each step's end."""
    from lightning.pytorch import Trainer

    import model_components
    from megakit.reporting.metrics import read_metrics
    from megakit.training import progress

    callback: Any = progress.Reporter
    original = callback.on_train_batch_end

    def on_train_batch_end(self: Any, trainer: Trainer, *args: Any) -> None:
        original(self, trainer, *args)
        clock.step()

    callback.on_train_batch_end = on_train_batch_end
    if job.every_loss:
        log_every_step(model_components)
    checkpoint = model_pretrain.pretrain(run)
    rows = read_metrics(run.path / "metrics.csv")
    if job.every_loss:
        clock.losses = [row.train_loss for row in rows if row.train_loss is not None]
        if len(clock.losses) != job.steps:
            raise RuntimeError(f"{len(clock.losses)} losses in metrics.csv of {job.steps} steps")
    clock.tell(val_loss=rows[-1].val_loss, lr=[row.lr for row in rows])
    # Here, as the script ends its process without coming back to `train`.
    shutil.rmtree(run.options.output_dir)
    return checkpoint


def log_every_step(components: Any) -> None:
    """Makes the trainer that a model file builds log each step."""
    original = components.build_trainer

    def build_trainer(*args: Any, **options: Any) -> Any:
        trainer = original(*args, **options)
        trainer.log_every_n_steps = 1
        return trainer

    components.build_trainer = build_trainer
