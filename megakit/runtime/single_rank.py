"""Skips collectives in process groups of one rank, where a collective returns its input.

Megatron calls the same collectives under every layout. The patches do not change groups of several
ranks.
"""

import functools
from typing import Any

import torch
from torch import distributed

from megakit.runtime.patching import patch, require_attribute

_OP = distributed.ReduceOp
#: Reductions that return a single value unchanged; NCCL's PREMUL_SUM multiplies the value first.
_NEUTRAL = (_OP.SUM, _OP.AVG, _OP.MAX, _OP.MIN, _OP.PRODUCT)
_patch = functools.partial(
    patch,
    group="fast",
    reason="a collective of one rank uses a queue and a thread of the backend",
    worth="12% of a step, with all three functions",
    when="with one rank",
)


def _has_one_rank(group: Any) -> bool:
    """Returns whether a process group, by default the group of all ranks, has one member."""
    if group is None:
        return distributed.is_initialized() and distributed.get_world_size() == 1
    # Outside of a group, torch passes an object of another type.
    return isinstance(group, distributed.ProcessGroup) and group.size() == 1


@functools.cache
def skip_collectives() -> None:
    """Applies the patches, once; imports Megatron."""
    from megatron.core.tensor_parallel import layers

    original = require_attribute(distributed, "all_reduce")

    @functools.wraps(original)
    def all_reduce(
        tensor: torch.Tensor, op: Any = _OP.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if not async_op and op in _NEUTRAL and _has_one_rank(group):
            return None
        return original(tensor, op, group, async_op)

    _patch(distributed, "all_reduce", all_reduce)
    # With these functions, Megatron's linear layers sum over tensor-parallel ranks.
    for kind in ("copy_to", "reduce_from"):
        name = f"{kind}_tensor_model_parallel_region"
        sum_over_ranks = require_attribute(layers, name)

        def region(input_: Any, group: Any = None, original: Any = sum_over_ranks) -> Any:
            return input_ if _has_one_rank(group) else original(input_, group=group)

        _patch(layers, name, functools.wraps(sum_over_ranks)(region))
