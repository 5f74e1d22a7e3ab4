"""Makes random numbers exact after a resumption: generators are seeded by seed and step."""

import hashlib
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

#: Lightning's and NeMo's modules have configs without a seed.
DEFAULT_SEED = 1234


class StepSeeds(pl.Callback):
    """Seeds torch's random generators at each training step, for dropout and other random numbers.

    Checkpoints do not contain the states of all ranks' generators. The seed of a step is derived
    from the seed of the model's config, the step, the pipeline stage and the data-parallel rank. So
    a resumed training draws the numbers of an uninterrupted one under the same layout. Tensor-
    parallel ranks have the same default generator, and different generators in Megatron's tracker.
    """

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        """Seeds the generators, unless a CUDA graph makes the steps: it refuses random numbers."""
        if getattr(trainer.strategy, "step_graph", None) is None:
            seed = getattr(getattr(module, "config", None), "seed", DEFAULT_SEED)
            seed_generators(seed, trainer.global_step)


def seed_generators(seed: int, step: int) -> None:
    """Seeds this rank's generators from a seed and the number of completed steps."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    data_rank = parallel_state.get_data_parallel_rank()
    digest = hashlib.sha256(f"{seed}/{step}/{stage}/{data_rank}".encode()).digest()
    # The CPU's generator uses 32 bits of the seed, and Megatron adds small numbers to it.
    step_seed = int.from_bytes(digest[:4], "little")
    torch.default_generator.manual_seed(step_seed)
    model_parallel_cuda_manual_seed(step_seed)
