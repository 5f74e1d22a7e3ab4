"""Replaces Megatron's loops over the weights by single calls for all weights.

Megatron loops where neither Apex nor Transformer Engine is installed. For the gradient's norm, it
then copies the norm of each weight to the host, and the host waits for the GPU each time.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megakit.runtime.patching import existing, replace

#: torch's functions of many tensors.
_copy = existing(torch, "_foreach_copy_")
_multiply = existing(torch, "_foreach_mul")
_multiply_in_place = existing(torch, "_foreach_mul_")
_norm = existing(torch, "_foreach_norm")


def l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
) -> tuple[Tensor, None]:
    """Returns the norm of all tensors together, float32 (1,), on their device."""
    norms = _norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.stack(norms).norm().float().reshape(1), None


def scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], factor: Any
) -> None:
    """Sets the tensors of the second list to those of the first list times a factor."""
    sources, targets = tensor_lists
    if not targets:  # torch's functions refuse empty lists
        return
    if all(source is target for source, target in zip(sources, targets, strict=True)):
        _multiply_in_place(list(targets), factor)  # without a second copy of all gradients
        return
    _copy(list(targets), _multiply(list(sources), factor))


def copy_all(this: list[Tensor], that: list[Tensor], overflow_buf: Tensor | None = None) -> None:
    """Copies each tensor of `this` to the tensor of `that` at its position; types may differ."""
    # Transformer Engine's FP8 weights are tensors of their own class, which convert in `copy_`.
    if any(type(target) not in (Tensor, torch.nn.Parameter) for target in that):
        for source, target in zip(this, that, strict=True):
            target.copy_(source)
    elif this:
        _copy(that, this)


@functools.cache
def replace_loops() -> None:
    """Replaces Megatron's loops, once; imports Megatron. Apex's functions are kept."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer

    for module, name, function in (
        (clip_grads, "l2_norm_impl", l2_norm),
        (clip_grads, "multi_tensor_scale_impl", scale),
        (optimizer, "multi_tensor_scale_impl", scale),
    ):
        if existing(module, name).__module__ == utils.__name__:
            replace(module, name, function)
    replace(optimizer, "_multi_tensor_copy_this_to_that", copy_all)
