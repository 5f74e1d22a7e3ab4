"""Makes dropout exact after a resumption: the generators' states follow from seed and step."""

import hashlib
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import nn

#: Lightning's and NeMo's modules have configs without a seed.
DEFAULT_SEED = 1234


class ExactDropout(pl.Callback):
    """Seeds the random generators at each training step, if the model has dropout.

    Checkpoints do not contain the states of all ranks' generators. The seed of a step is derived
    from the seed of the model's config, the step, the pipeline stage and the data-parallel rank. So
    a resumed training draws the numbers of an uninterrupted one under the same layout. Tensor-
    parallel ranks have the same default generator, and different generators in Megatron's tracker.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds out whether this rank's part of the model has dropout."""
        config = getattr(pl_module, "config", None)
        self._seed = getattr(config, "seed", DEFAULT_SEED) if has_dropout(pl_module) else None

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Seeds torch's default generator and Megatron's tracker."""
        if self._seed is not None:
            seed_generators(self._seed, trainer.global_step)


def has_dropout(model: nn.Module) -> bool:
    """Tells whether a module draws random numbers for dropout in training."""
    # The rate's name in torch's `nn.Dropout`, in its attention and recurrent layers, in Megatron's.
    names = ("p", "dropout", "hidden_dropout")
    rates = [getattr(module, name, None) for module in model.modules() for name in names]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def seed_generators(seed: int, step: int) -> None:
    """Seeds this rank's generators from a seed and the number of completed steps."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    data_rank = parallel_state.get_data_parallel_rank()
    digest = hashlib.sha256(f"{seed}/{step}/{stage}/{data_rank}".encode()).digest()
    # The CPU's generator uses 32 bits of the seed, and Megatron adds small numbers to it.
    step_seed = int.from_bytes(digest[:4], "little")
    torch.default_generator.manual_seed(step_seed)
    model_parallel_cuda_manual_seed(step_seed)
