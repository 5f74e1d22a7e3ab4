"""Averages BatchNorm's statistics over data-parallel ranks, and refuses other unequal buffers.

A checkpoint contains the buffers of one rank.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import nn

from megakit.errors import UserError
from megakit.runtime.patching import require_attribute

#: torch's base class of all kinds of BatchNorm, and its copy of many tensors.
_BatchNorm: Any = require_attribute(nn.modules.batchnorm, "_BatchNorm")
_copy: Any = require_attribute(torch, "_foreach_copy_")


def batch_norms(model: nn.Module) -> list[Any]:
    """Returns the layers that normalize by the statistics of a micro batch."""
    return [
        module
        for module in model.modules()
        # The statistics of a SyncBatchNorm are those of all ranks.
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
    ]


def average_running_statistics(layers: list[Any]) -> None:
    """Averages running means and variances over the data-parallel ranks, in float32.

    Each rank updates them from its own samples. A layer in evaluation mode is frozen, and left out.
    """
    pairs = [(layer.running_mean, layer.running_var) for layer in layers if layer.training]
    buffers = [buffer for pair in pairs for buffer in pair if buffer is not None]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if buffers and group.size() > 1:
        together = torch.cat([buffer.float() for buffer in buffers])
        torch.distributed.all_reduce(together, group=group)
        parts = (together / group.size()).split([len(buffer) for buffer in buffers])
        _copy(buffers, parts)


def refuse_different_buffers(model: nn.Module) -> None:
    """Refuses a saved buffer that differs between data-parallel ranks.

    Raises:
        UserError: A buffer differs; all ranks name the first one.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    model = unwrap_model(model)
    saved = model.state_dict().keys()
    for name, value in model.named_buffers():
        if name not in saved:
            continue
        largest = torch.stack([value.double(), -value.double()])
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
        if not torch.equal(largest[0], -largest[1]):
            raise UserError(
                f"Buffer {name}: its values differ between data-parallel ranks, and a checkpoint "
                "contains those of one rank. Average it over these ranks where the model changes "
                "it. If no output depends on it, register_buffer(..., persistent=False) saves none."
            )
