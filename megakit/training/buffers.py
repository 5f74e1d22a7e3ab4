"""Keeps buffers equal on all data-parallel ranks: a checkpoint contains those of one rank."""

import re
import zlib
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from megakit.errors import UserError
from megakit.runtime.patching import require_attribute
from megakit.training.validation import on_host

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

    Each rank updates them from its own samples. A frozen layer is in evaluation mode.
    """
    pairs = [(layer.running_mean, layer.running_var) for layer in layers if layer.training]
    buffers = [buffer for pair in pairs for buffer in pair if buffer is not None]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if buffers and group.size() > 1:
        together = torch.cat([buffer.float() for buffer in buffers])
        torch.distributed.all_reduce(together, group=group)
        parts = (together / group.size()).split([len(buffer) for buffer in buffers])
        _copy(buffers, parts)


def refuse_different_buffers(model: nn.Module, device: torch.device) -> None:
    """Refuses a saved buffer that differs between data-parallel ranks.

    Raises:
        UserError: A buffer differs; all ranks name the first one.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    buffers = {
        re.sub(r"^(module\.)*", "", f"{path}.{name}"): buffer  # without the wrappers' names
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if group.size() > 1
        if name not in require_attribute(module, "_non_persistent_buffers_set")
    }
    if not buffers:
        return
    copies = on_host(buffers).values()
    sums = [zlib.crc32(each.reshape(-1).view(torch.uint8).numpy()) for each in copies]
    extremes = torch.tensor([[number, -number] for number in sums], device=device)
    torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX, group)
    for name, (most, negative_least) in zip(buffers, extremes.tolist(), strict=True):
        if most != -negative_least:
            raise UserError(
                f"Buffer {name}: its values differ between data-parallel ranks, and a checkpoint "
                "contains those of one rank. Average it over these ranks where the model changes "
                "it, or leave it out of checkpoints by register_buffer(..., persistent=False)."
            )
