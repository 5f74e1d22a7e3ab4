"""Builds a model on the ranks of a job without training, for example to generate text."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from megakit.runtime.patching import patch, require_attribute


def build_on_ranks(model: pl.LightningModule, trainer: pl.Trainer) -> torch.nn.Module:
    """Sets up the job's process groups, and builds this rank's part of a model.

    All ranks have to call this function. `trainer.predict` is simpler for a model that is called
    once for each sample; this function is for programs that call the model in another way.

    Args:
        model: The Lightning module. Its config names the checkpoint with the weights.
        trainer: The `nemo.lightning.Trainer`.

    Returns:
        This rank's part of the Megatron model, in evaluation mode, on the rank's device, in the
        trainer's precision.
    """
    strategy: Any = trainer.strategy
    strategy.connect(model)
    strategy.setup_environment()
    model.configure_model()
    strategy.trainer = trainer
    trainer.state.fn = TrainerFn.TESTING  # without gradients
    patch(strategy, "_setup_optimizers", False)
    strategy.setup_megatron_parallel(trainer)
    part: Any = require_attribute(strategy.model[0], "module")
    return part.eval()
