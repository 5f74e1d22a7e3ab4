"""Builds Megatron's two linear layers with the initial weights of torch's `nn.Linear`."""

import math
from typing import Any, TypeVar

import torch
from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megakit.models.seeding import seeded
from megakit.runtime.patching import require_attribute

LayerT = TypeVar("LayerT", ColumnParallelLinear, RowParallelLinear)


#: Megatron's private method that computes the matrix product; `_Linear` overrides it.
for _layer in (ColumnParallelLinear, RowParallelLinear):
    require_attribute(_layer, "_forward_impl")
#: Options of Megatron's matrix product that torch's product supports or can ignore.
_SUPPORTED = {"bias", "tp_group", "wgrad_deferral_limit"}


class _Linear:
    """Base of both layers: torch's attribute names, and torch's matrix product if possible."""

    in_features = property(lambda self: self.input_size)
    out_features = property(lambda self: self.output_size)

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        """Computes the product with this rank's weights.

        Megatron's function can also all-reduce the input's gradient, gather the shards of a
        sequence, and accumulate gradients in place. If none of these is requested, torch's function
        gives the same result, up to rounding, in half the time. It also does not compute gradients
        of inputs that need none, such as images.
        """
        requested = {n for n, value in options.items() if not (value is None or value is False)}
        # Not without gradients: a recomputation would then differ from the first pass by rounding.
        if not input.requires_grad and torch.is_grad_enabled():
            requested.discard("allreduce_dgrad")
        if requested - _SUPPORTED or "bias" not in options:
            return super()._forward_impl(input=input, weight=weight, **options)  # type: ignore[misc]
        return torch.nn.functional.linear(input, weight, options["bias"])


class _ColumnParallel(_Linear, ColumnParallelLinear):
    """Adds its bias in the matrix product, also where Megatron's MLP would add it afterwards."""

    def __init__(self, *args: Any, config: ModelParallelConfig, **options: Any) -> None:
        super().__init__(*args, config=config, **options)
        # Megatron's fused activation needs the bias. Without it, the MLP accepts None as bias.
        if not getattr(config, "bias_activation_fusion", False):
            self.skip_bias_add = False


class _RowParallel(_Linear, RowParallelLinear):
    pass


def column_parallel_linear(
    config: ModelParallelConfig, in_features: int, out_features: int, name: str
) -> ColumnParallelLinear:
    """Builds a linear layer whose output features are sharded over the tensor-parallel ranks.

    Rank r of t computes the features `r * out / t` up to `(r + 1) * out / t`. The features are not
    gathered, so a row-parallel layer must follow. The layer maps (..., in) to
    ((..., out / t), None). The config's `seed` and `name` determine the initial weights.
    """
    return _build(_ColumnParallel, config, in_features, out_features, name, gather_output=False)


def row_parallel_linear(
    config: ModelParallelConfig, in_features: int, out_features: int, name: str
) -> RowParallelLinear:
    """Builds a linear layer whose input features are sharded over the tensor-parallel ranks.

    Each rank multiplies its shard of the input by its columns of the weight. An all-reduce sums the
    products, and then the bias is added once. The layer maps (..., in / t) to ((..., out), None).
    The config's `seed` and `name` determine the initial weights.
    """
    options = {"bias": True, "input_is_parallel": True, "skip_bias_add": False}
    return _build(_RowParallel, config, in_features, out_features, name, **options)


def _build(
    kind: type[LayerT],
    config: ModelParallelConfig,
    in_features: int,
    out_features: int,
    name: str,
    **options: bool,
) -> LayerT:
    bound = 1 / math.sqrt(in_features)
    with seeded(config.seed, name):
        layer = kind(
            in_features,
            out_features,
            config=config,
            init_method=lambda weight: weight.uniform_(-bound, bound),
            **options,
        )
        # Megatron's bias is zero. Here each rank draws the whole bias and keeps its shard.
        bias = torch.empty(out_features).uniform_(-bound, bound)
    shards = bias.view(-1, len(layer.bias))
    layer.bias.data.copy_(shards[layer.tp_group.rank() if len(shards) > 1 else 0])
    return layer
