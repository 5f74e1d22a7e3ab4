"""12. Contiguous tensors where ranks add up.

Two layers of your own multiply a transposed copy of their input, and transpose the product back.
Megatron's `reduce_from...` adds up the parts of z that two tensor-parallel ranks have computed, and
in the backward pass `copy_to...` adds up the parts of z's gradient. What does each rank receive if
its part is a transposed view, whose numbers are not contiguous in memory?

Its own part: Megatron 0.15.3 adds up a contiguous copy of the part, and returns the part. No error
is raised, and the loss changes little. megakit's patch returns the copy, which has the sum.

Try: let `product` return `nn.functional.linear(x, weight)`, the same product. What does each rank
receive without the patch? And with `.T.contiguous().T` after it, which changes no number?
"""

from typing import Any

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    mappings,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from experiments.training import HookedModel, train
from model_components import PretrainConfig

#: What this rank received in place of each sum. Each run has processes of its own.
SUMS: list[Tensor] = []


def product(weight: Tensor, x: Tensor) -> Tensor:
    """Multiplies a transposed copy of the input, and transposes the product back."""
    return (weight @ x.T.contiguous()).T


class Row(nn.Module):
    """A row-parallel layer, with the weights of one of Megatron's layers."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Any:
        total = reduce_from_tensor_model_parallel_region(product(self.weight, x))
        SUMS.append(total)
        return total + self.bias, None


class Column(Row):
    """A column-parallel layer."""

    def forward(self, x: Any) -> Any:
        x.register_hook(SUMS.append)
        x = copy_to_tensor_model_parallel_region(x)
        return product(self.weight, x) + self.bias, None


class RowModel(HookedModel):
    """The autoencoder with `Row` as linear2, which computes z."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear2 = Row(self.linear2)


class ColumnModel(HookedModel):
    """The autoencoder with `Column` as linear3, which reads z."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear3 = Column(self.linear3)


def loss(model: type[HookedModel]) -> str:
    """Trains on two tensor-parallel ranks."""
    return train(PretrainConfig(model_cls=model), tensor=2).loss


def first_number(model: type[HookedModel], scale: int = 1) -> str:
    """Trains, and returns the first number of what this rank received first."""
    loss(model)
    return f"{SUMS[0][0, 0] * scale:.4f}"


def leave_out_patch() -> None:
    """Gives Megatron back its own function, which the patch calls."""
    vars(mappings)["_reduce"] = vars(mappings)["_reduce"].__wrapped__


def with_sum() -> str:
    """The first number of z before the bias, with megakit's patch."""
    return first_number(RowModel)


def without_sum() -> str:
    """The first number of z before the bias, as Megatron 0.15.3 returns it."""
    leave_out_patch()
    return first_number(RowModel)


def with_loss() -> str:
    """The loss of the same training, with megakit's patch."""
    return loss(RowModel)


def without_loss() -> str:
    """The loss of the same training, with Megatron's own function."""
    leave_out_patch()
    return loss(RowModel)


def with_gradient() -> str:
    """The first number of z's gradient, times 10,000, with megakit's patch."""
    return first_number(ColumnModel, 10_000)


def without_gradient() -> str:
    """The first number of z's gradient, times 10,000, as Megatron 0.15.3 returns it."""
    leave_out_patch()
    return first_number(ColumnModel, 10_000)
