"""4. Column-parallel and row-parallel layers, and equal copies.

What happens if linear1 is a plain `nn.Linear`, and linear2 one of Megatron's layers? And if two
tensor-parallel ranks hold copies of a plain layer, `mixing`, with different initial weights: does
training make the copies equal?

linear2 expects the features of one rank, a half. Megatron does not synchronize replicated weights
over tensor-parallel ranks, so the copies stay different, and no error is raised.

Try: train for `steps=50` in `weight_of`. Do the copies approach each other?
"""

from typing import Any

from megatron.core import parallel_state
from torch import Tensor, nn

from experiments.training import HookedModel, train
from megakit.models import seeded
from model_components import PretrainConfig


class PlainLinear(nn.Linear):
    """torch's layer, which returns a pair as Megatron's layers do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class PlainModel(HookedModel):
    """The autoencoder with torch's layer in place of the column-parallel linear1."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear1 = PlainLinear(28 * 28, config.hidden_size)


class Mixing(HookedModel):
    """The autoencoder with a replicated layer after the trunk."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        with seeded(config.seed, self.seed_name()):
            self.mixing = nn.Linear(config.latent_size, config.latent_size)

    def seed_name(self) -> str:
        return "mixing"

    def on_latent(self, z: Tensor) -> Tensor:
        return self.mixing(z)


class MixingOfRank(Mixing):
    """Each rank draws other initial weights."""

    def seed_name(self) -> str:
        return f"mixing of rank {parallel_state.get_tensor_model_parallel_rank()}"


def weight_of(model: type[Mixing]) -> str:
    """Trains, and returns one weight of the replicated layer."""
    return f"{train(PretrainConfig(model_cls=model), tensor=2).weights['mixing.weight'][0, 0]:.4f}"


def without_parallel_layers() -> str:
    """`nn.Linear(784, 64)` as linear1, followed by Megatron's linear2."""
    return train(PretrainConfig(model_cls=PlainModel), tensor=2).loss


def with_equal_initial_weights() -> str:
    """One weight of the replicated layer after training, with equal initial weights."""
    return weight_of(Mixing)


def without_equal_initial_weights() -> str:
    """One weight of the replicated layer after training, with other initial weights per rank."""
    return weight_of(MixingOfRank)
