"""Replaces Megatron's loops over the weights by single calls for all weights.

Megatron loops where neither Apex nor Transformer Engine is installed. For the gradient's norm, it
then copies the norm of each weight to the host, and the host waits for the GPU each time.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megakit.runtime.patching import patch, require_attribute

Lists = Sequence[list[Tensor]]

#: torch's functions of many tensors.
_copy = require_attribute(torch, "_foreach_copy_")
_multiply = require_attribute(torch, "_foreach_mul_")
_norm = require_attribute(torch, "_foreach_norm")


def l2_norm(chunk_size: int, flag: Tensor, lists: Lists, *args: Any) -> tuple[Tensor, None]:
    """Returns the norm of all tensors together, float32 (1,), on their device."""
    norms = _norm([tensor for tensors in lists for tensor in tensors])
    return torch.stack(norms).norm().float().reshape(1), None


def scale(chunk_size: int, flag: Tensor, lists: Lists, factor: Any) -> None:
    """Sets the tensors of the second list to those of the first list times a factor."""
    sources, targets = lists
    copy_all(sources, targets)
    if targets:  # torch's functions refuse empty lists
        _multiply(targets, factor)


def copy_all(this: list[Tensor], that: list[Tensor], overflow_buf: Tensor | None = None) -> None:
    """Copies each tensor of `this` to the tensor of `that` at its position; types may differ."""
    if this and this is not that:  # to clip gradients, Megatron passes the same list twice
        _copy(that, this)


@functools.cache
def replace_loops() -> None:
    """Replaces Megatron's loops, once; imports Megatron."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer

    if require_attribute(clip_grads, "l2_norm_impl") is require_attribute(
        utils, "local_multi_tensor_l2_norm"
    ):
        for owner, name, function in (
            (clip_grads, "l2_norm_impl", l2_norm),
            (clip_grads, "multi_tensor_scale_impl", scale),
            (optimizer, "_multi_tensor_copy_this_to_that", copy_all),
        ):
            patch(
                *(owner, name, function),
                group="fast",
                reason="Megatron loops over the weights, and reads each norm from the GPU",
                worth="a synchronization per weight on a GPU",
                when="without Apex and Transformer Engine",
            )
