"""8. Megatron's random generators for sharded activations.

Each of two tensor-parallel ranks holds 32 of the 64 hidden features, and drops half of them. Which
features does each rank drop if both draw from torch's default generator?

NeMo seeds the default generators of both ranks equally, so feature n and feature n + 32 are always
dropped together. Megatron's second generator has another seed on each rank.

Try: rename `on_hidden` in `Dropout` to `on_latent`, so dropout acts on z, a copy of which each rank
computes. Which generator is right now?
"""

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.nn.functional import dropout

from experiments.training import HookedModel, train
from model_components import PretrainConfig

#: The dropout masks of this rank. Each run has processes of its own.
MASKS: list[Tensor] = []


class Dropout(HookedModel):
    """The autoencoder with dropout on the sharded features, drawn from the second generator."""

    def mask(self, ones: Tensor) -> Tensor:
        with get_cuda_rng_tracker().fork():
            return dropout(ones, 0.5)

    def on_hidden(self, hidden: Tensor) -> Tensor:
        MASKS.append(self.mask(torch.ones_like(hidden)))
        return hidden * MASKS[-1]


class DefaultDropout(Dropout):
    """Draws from torch's default generator."""

    def mask(self, ones: Tensor) -> Tensor:
        return dropout(ones, 0.5)


def equal_positions(model: type[Dropout]) -> str:
    """Trains, and compares the dropout masks of the two ranks."""
    train(PretrainConfig(model_cls=model), tensor=2)
    masks = torch.cat(MASKS)
    both = [torch.empty_like(masks) for _ in range(2)]
    torch.distributed.all_gather(both, masks)
    share = float((both[0] == both[1]).float().mean())
    # How many are equal by chance depends on the processor's random numbers.
    how_many = "all" if share == 1 else "about half of" if 0.35 < share < 0.65 else f"{share} of"
    return f"{how_many} {masks.numel()} positions are equal"


def with_second_generator() -> str:
    """The masks of the two ranks, drawn from Megatron's second generator."""
    return equal_positions(Dropout)


def without_second_generator() -> str:
    """The masks of the two ranks, drawn from torch's default generator."""
    return equal_positions(DefaultDropout)
