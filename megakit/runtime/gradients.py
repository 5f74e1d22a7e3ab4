"""The gradients' norm and clipping, where neither Transformer Engine nor Apex is there.

Megatron then falls back to functions of its own, which go weight by weight and read the norm of
each as a number: slow on a CPU, and on a GPU a wait for it at every weight. These do the same for
all weights at once, bit by bit.
"""

import functools
from typing import Any

import torch

from megakit.runtime.patching import existing, replace

Lists = list[list[torch.Tensor]]


def l2_norm(chunk_size: int, overflow: Any, lists: Lists, *args: Any) -> tuple[torch.Tensor, None]:
    """The norm of all tensors of the one list, float32 (1,)."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).view(1), None


def scale(chunk_size: int, overflow: Any, lists: Lists, factor: float) -> None:
    """Multiplies tensors in place; Megatron gives their list twice, as source and as target."""
    torch._foreach_mul_(lists[1], factor)


@functools.cache
def measure_at_once() -> None:
    """Puts these where Megatron uses its own; imports Megatron."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    if existing(clip_grads, "l2_norm_impl") is local_multi_tensor_l2_norm:
        replace(clip_grads, "l2_norm_impl", l2_norm)
        replace(clip_grads, "multi_tensor_scale_impl", scale)
