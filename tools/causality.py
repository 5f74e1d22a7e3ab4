"""Says whether outputs before a position change with the token at this position."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def is_causal(model: nn.Module) -> bool:
    """Returns whether a module says so, by the attribute of Megatron's attention."""
    kinds = (getattr(module, "attn_mask_type", None) for module in model.modules())
    return any("causal" in getattr(kind, "name", "") for kind in kinds)


def find_leak(step: Callable[..., Any], batches: Iterator[Any], model: nn.Module) -> str:
    """Returns the first module whose outputs before a token depend on it; empty if there is none.

    Args:
        step: The program's `forward_step_func`.
        batches: Its micro batches, of which one tensor, (samples, tokens), is changed.
        model: The model, in one process.
    """
    leaves, form = tree_flatten(next(batches))
    numbers = (n for n, leaf in enumerate(leaves) if _is_tokens(leaf))
    if (number := next(numbers, None)) is None:
        return ""
    length = leaves[number].shape[1]
    place = length // 2
    changed = [copy.copy(leaf) for leaf in leaves]
    changed[number] = leaves[number].clone()
    other = leaves[number].roll(1, dims=1)[:, place]  # a token that occurs
    changed[number][:, place] = torch.where(other == leaves[number][:, place], other ^ 1, other)
    first, second = (
        _outputs(step, tree_unflatten(parts, form), model) for parts in (leaves, changed)
    )
    for (name, one), (_, two) in zip(first, second, strict=True):
        axis = next((n for n, size in enumerate(one.shape[:2]) if size == length), None)
        if axis is None or one.shape != two.shape or not one.is_floating_point():
            continue
        before, after = one.narrow(axis, 0, place), two.narrow(axis, 0, place)
        if not torch.allclose(before, after, rtol=1e-3, atol=1e-5 * float(before.abs().max())):
            return name
    return ""


def _is_tokens(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.dim() == 2
        and leaf.dtype == torch.int64
        and leaf.shape[1] > 2
    )


@torch.no_grad()
def _outputs(step: Callable[..., Any], batch: Any, model: nn.Module) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    was_training = model.training
    hooks = []
    for name, module in model.named_modules():
        inner = name.replace("module.", "").removeprefix("module")
        if inner:  # the model itself may return losses, whose labels are the next tokens

            def note(module: nn.Module, inputs: Any, output: Any, name: str = inner) -> None:
                found.extend(
                    (name, leaf.clone())
                    for leaf in tree_leaves(output)[:1]
                    if isinstance(leaf, Tensor)
                )

            hooks.append(module.register_forward_hook(note))
    model.eval()
    step(iter([batch]), model)
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    return found
