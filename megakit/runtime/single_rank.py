"""Collectives of a rank that is the only one in its group.

Megatron runs the same collectives under every layout: in a group of one rank each of them returns
what it was given, by way of a queue and a thread of the backend. A fifth of a small model's step
goes there. Here such a group is left out; groups of several ranks are untouched.
"""

import contextlib
import functools
from typing import Any

import torch
from torch import distributed

from megakit.runtime.patching import existing, replace

_OP = distributed.ReduceOp
#: Of one value they give that value; NCCL's PREMUL_SUM multiplies it first.
_NEUTRAL = (_OP.SUM, _OP.AVG, _OP.MAX, _OP.MIN, _OP.PRODUCT)


def sums_over_one_rank_are_there() -> None:
    """The sum, mean or maximum over one rank is what that rank has."""
    original = existing(distributed, "all_reduce")

    @functools.wraps(original)
    def all_reduce(
        tensor: torch.Tensor,
        op: Any = _OP.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not async_op and op in _NEUTRAL and _is_of_one(group):
            return None
        return original(tensor, op, group, async_op)

    replace(distributed, "all_reduce", all_reduce)


def nothing_is_gathered_up_for_one_rank() -> None:
    """Megatron has the backend collect the sums of all gradient buffers into one call."""
    from megatron.core.distributed import param_and_grad_buffer

    original = existing(param_and_grad_buffer, "_coalescing_manager")

    def coalescing_manager(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_ops") and not args and _is_of_one(group):
            return contextlib.nullcontext()
        return original(group, *args, **kwargs)

    replace(param_and_grad_buffer, "_coalescing_manager", coalescing_manager)


def nothing_is_sent_around_layers_of_one_rank() -> None:
    """Megatron's two linear layers wrap their input or output so that gradients are summed up."""
    from megatron.core.tensor_parallel import layers

    for name in (
        "copy_to_tensor_model_parallel_region",
        "reduce_from_tensor_model_parallel_region",
    ):
        original = existing(layers, name)

        def region(input_: Any, group: Any = None, original: Any = original) -> Any:
            return input_ if _is_of_one(group) else original(input_, group=group)

        replace(layers, name, functools.wraps(original)(region))


def _is_of_one(group: Any) -> bool:
    """Whether a group, by default all ranks, has one member; kinds of others' are left alone."""
    if group is None:
        return distributed.is_initialized() and distributed.get_world_size() == 1
    return isinstance(group, distributed.ProcessGroup) and group.size() == 1


PATCHES = (
    sums_over_one_rank_are_there,
    nothing_is_gathered_up_for_one_rank,
    nothing_is_sent_around_layers_of_one_rank,
)


@functools.cache
def skip_collectives_of_one() -> None:
    """Applies the patches, once; imports Megatron."""
    for patch in PATCHES:
        patch()
