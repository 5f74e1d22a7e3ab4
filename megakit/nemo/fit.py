"""Trains a model with a trainer, like `nemo.collections.llm.train`.

The trainer itself is built by `build_trainer` in model_trainer.py, in the reader's own file.
"""

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping
from nemo import lightning as nl

from megakit.nemo.callbacks import StepSeeds
from megakit.nemo.step_loop import use_step_loop
from megakit.runtime.patching import require_attribute


def train(
    *,
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    log: nl.NeMoLogger | None = None,
    resume: nl.AutoResume | str | Path | None = None,
) -> None:
    """Trains a model like `nemo.collections.llm.train`, which needs more packages.

    A resumed training counts and validates like an uninterrupted one (`StepLoop`), and draws the
    same random numbers (`StepSeeds`). Checkpoints are saved synchronously: the processes of NeMo's
    asynchronous saves would import the main script again.

    Args:
        model: A Lightning module for NeMo's strategies.
        data: The Lightning data module.
        trainer: The `nemo.lightning.Trainer`.
        log: A NeMoLogger, or None.
        resume: The checkpoint to resume from, or an AutoResume that finds it; None: none.
    """
    callbacks = require_attribute(trainer, "callbacks")
    if isinstance(trainer.strategy, nl.MegatronStrategy):
        use_step_loop(trainer)
        trainer.strategy.async_save = False
        callbacks.insert(0, StepSeeds())
    # First whoever stops the training, so that the others know which validation is the last.
    callbacks.sort(key=lambda callback: not isinstance(callback, EarlyStopping))
    if log is not None:
        log.setup(trainer, resume_if_exists=getattr(resume, "resume_if_exists", False))
    if isinstance(resume, str | Path):
        nl.AutoResume(resume_from_path=str(resume)).setup(trainer, model)
    elif resume is not None:
        resume.setup(trainer, model)
    trainer.fit(model, datamodule=data)
