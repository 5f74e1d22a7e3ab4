"""Megatron's two linear layers, made as torch's `nn.Linear` would make them."""

import contextlib
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear


@contextlib.contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Draws initial weights inside from a generator of (seed, name); torch's is put back after.

    NeMo seeds each pipeline stage differently, so that a layer's first weights would depend on the
    layout. By name they are the same under every layout, and on a CPU and a GPU, provided that
    Megatron makes them on the CPU (`use_cpu_initialization`).
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield


#: What Megatron's layers give their product that asks nothing of it by itself.
_PLAIN = {"bias", "tp_group", "wgrad_deferral_limit"}


class _Linear:
    """What both layers have in common: torch's names, and torch's product where it will do."""

    in_features = property(lambda self: self.input_size)
    out_features = property(lambda self: self.output_size)

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> Any:
        """The product with this rank's weights.

        Megatron's own can also send the input's gradient to the other ranks, gather a sequence's
        parts, and add to gradients in place. Where nothing of the kind is asked for, torch's gives
        the same, up to rounding, in half the time; and it leaves out the gradient of images, which
        nobody needs.
        """
        asked = {name for name, value in options.items() if not (value is None or value is False)}
        if not input.requires_grad:
            asked.discard("allreduce_dgrad")
        if asked - _PLAIN:
            return super()._forward_impl(input=input, weight=weight, **options)  # type: ignore[misc]
        return torch.nn.functional.linear(input, weight, options["bias"])


class _ColumnParallel(_Linear, ColumnParallelLinear):
    pass


class _RowParallel(_Linear, RowParallelLinear):
    pass


def column_parallel_linear(
    config: ModelParallelConfig, in_features: int, out_features: int, name: str
) -> ColumnParallelLinear:
    """A linear layer whose output features are spread over the tensor-parallel ranks.

    Rank r of t computes features `r * out / t` up to `(r + 1) * out / t` and keeps them, so a
    row-parallel layer has to follow. Called with (..., in), it returns ((..., out / t), None).

    Args:
        config: The model's config; its `seed` and the name decide the first weights.
        in_features: Size of the input's last dimension.
        out_features: Size of the output's last dimension over all ranks.
        name: Of the layer within the model.
    """
    with seeded(config.seed, name):
        bound = 1 / math.sqrt(in_features)
        layer = _ColumnParallel(
            in_features,
            out_features,
            config=config,
            init_method=lambda weight: weight.uniform_(-bound, bound),
            gather_output=False,
        )
        # Megatron leaves the bias at zero. Every rank draws all of it and keeps its own part.
        bias = torch.empty(out_features).uniform_(-bound, bound)
    shard = bias.tensor_split(layer.tp_group.size())[layer.tp_group.rank()]
    layer.bias.data.copy_(shard)
    return layer


def row_parallel_linear(
    config: ModelParallelConfig, in_features: int, out_features: int, name: str
) -> RowParallelLinear:
    """A linear layer whose input features are spread over the tensor-parallel ranks.

    Each rank multiplies its part of the input with its columns of the weight; an all-reduce adds
    the products, and the bias comes on top once. Called with (..., in / t), it returns
    ((..., out), None).

    Args:
        config: The model's config; its `seed` and the name decide the first weights.
        in_features: Size of the input's last dimension over all ranks.
        out_features: Size of the output's last dimension.
        name: Of the layer within the model.
    """
    with seeded(config.seed, name):
        bound = 1 / math.sqrt(in_features)
        layer = _RowParallel(
            in_features,
            out_features,
            config=config,
            init_method=lambda weight: weight.uniform_(-bound, bound),
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        layer.bias.data.copy_(torch.empty(out_features).uniform_(-bound, bound))
    return layer
