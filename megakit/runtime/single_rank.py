"""Skips collectives in process groups of one rank.

Megatron calls the same collectives under every layout. In a group of one rank, a collective returns
its input, but uses a queue and a thread of the backend. These calls take a fifth of a small model's
step. The patches skip them, and do not change groups of several ranks.
"""

import contextlib
import functools
from typing import Any

import torch
from torch import distributed

from megakit.runtime.patching import existing, replace

_OP = distributed.ReduceOp
#: Reductions that return a single value unchanged; NCCL's PREMUL_SUM multiplies the value first.
_NEUTRAL = (_OP.SUM, _OP.AVG, _OP.MAX, _OP.MIN, _OP.PRODUCT)


def skip_all_reduce() -> None:
    """Skips `all_reduce` over one rank: a sum, mean or maximum over one rank is its input."""
    original = existing(distributed, "all_reduce")

    @functools.wraps(original)
    def all_reduce(
        tensor: torch.Tensor, op: Any = _OP.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if not async_op and op in _NEUTRAL and _has_one_rank(group):
            return None
        return original(tensor, op, group, async_op)

    replace(distributed, "all_reduce", all_reduce)


def skip_coalescing() -> None:
    """Skips Megatron's coalescing of the reductions of all gradient buffers into one call."""
    from megatron.core.distributed import param_and_grad_buffer

    original = existing(param_and_grad_buffer, "_coalescing_manager")

    def coalescing_manager(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_ops") and not args and _has_one_rank(group):
            return contextlib.nullcontext()
        return original(group, *args, **kwargs)

    replace(param_and_grad_buffer, "_coalescing_manager", coalescing_manager)


def skip_tensor_parallel_regions() -> None:
    """Skips the functions with which Megatron's linear layers sum over tensor-parallel ranks."""
    from megatron.core.tensor_parallel import layers

    for kind in ("copy_to", "reduce_from"):
        name = f"{kind}_tensor_model_parallel_region"
        original = existing(layers, name)

        def region(input_: Any, group: Any = None, original: Any = original) -> Any:
            return input_ if _has_one_rank(group) else original(input_, group=group)

        replace(layers, name, functools.wraps(original)(region))


def _has_one_rank(group: Any) -> bool:
    """Returns whether a process group, by default the group of all ranks, has one member.

    Objects that are not torch process groups are not patched: the result is False.
    """
    if group is None:
        return distributed.is_initialized() and distributed.get_world_size() == 1
    return isinstance(group, distributed.ProcessGroup) and group.size() == 1


PATCHES = (skip_all_reduce, skip_coalescing, skip_tensor_parallel_regions)


@functools.cache
def skip_collectives() -> None:
    """Applies the patches, once; imports Megatron."""
    for patch in PATCHES:
        patch()
