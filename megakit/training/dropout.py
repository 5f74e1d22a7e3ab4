"""Makes dropout exact after a resumption: the generators' states follow from seed and step."""

import hashlib
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

#: Lightning's and NeMo's modules have configs without a seed.
DEFAULT_SEED = 1234


class ExactDropout(pl.Callback):
    """Seeds the random generators at each training step, if the model has dropout.

    Checkpoints do not contain the states of all ranks' generators. The seed of a step is derived
    from the seed of the model's config, the step, the pipeline stage and the data-parallel rank. So
    a resumed training draws the numbers of an uninterrupted one under the same layout. Tensor-
    parallel ranks have the same default generator, and different generators in Megatron's tracker.
    """

    def __init__(self) -> None:
        self._is_needed = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds out whether this rank's part of the model has dropout."""
        self._is_needed = has_dropout(pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Seeds torch's default generator and Megatron's tracker."""
        if self._is_needed:
            config_seed = getattr(getattr(pl_module, "config", None), "seed", DEFAULT_SEED)
            seed_generators(config_seed, trainer.global_step)


def has_dropout(model: nn.Module) -> bool:
    """Tells whether a module draws random numbers for dropout in training."""
    return any(map(_draws, model.modules()))


def _draws(module: nn.Module) -> bool:
    if isinstance(module, TransformerLayer):
        return bool(max(module.config.hidden_dropout, module.config.attention_dropout) > 0)
    if isinstance(module, nn.RReLU):
        return True
    # `nn.MultiheadAttention` and torch's recurrent layers have a rate of this name.
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float) and rate > 0


def seed_generators(seed: int, step: int) -> None:
    """Seeds this rank's generators from a seed and the number of completed steps."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    data_rank = parallel_state.get_data_parallel_rank()
    digest = hashlib.sha256(f"{seed}/{step}/{stage}/{data_rank}".encode()).digest()
    # The CPU's generator uses 32 bits of the seed, and Megatron adds small numbers to it.
    step_seed = int.from_bytes(digest[:4], "little")
    torch.default_generator.manual_seed(step_seed)
    model_parallel_cuda_manual_seed(step_seed)
