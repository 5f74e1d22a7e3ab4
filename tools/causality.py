"""Says whether outputs before a position change with the token at this position."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def is_causal(model: nn.Module) -> bool:
    """Returns whether a module says so, by the attribute of Megatron's attention."""
    kinds = (getattr(module, "attn_mask_type", None) for module in model.modules())
    # Multi-token prediction reads the next tokens on purpose.
    predicts_more = any("mtp" in name.split(".") for name, _ in model.named_modules())
    return not predicts_more and any("causal" in getattr(kind, "name", "") for kind in kinds)


def find_leak(step: Callable[..., Any], batches: Iterator[Any], model: nn.Module) -> str:
    """Returns the first module whose outputs before a token depend on it; empty if there is none.

    Args:
        step: The program's `forward_step_func`.
        batches: Its micro batches, of which one tensor, (samples, tokens), is changed.
        model: The model, in one process.
    """
    leaves, form = tree_flatten(next(batches, None))
    numbers = (n for n, leaf in enumerate(leaves) if is_tokens(leaf))
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
    sizes = leaves[number].shape
    for name, one in first.items():
        two = second[name]
        axis = {tuple(sizes): 1, tuple(sizes)[::-1]: 0}.get(tuple(one.shape[:2]))
        if axis is None or one.dim() < 3 or one.shape != two.shape or not one.is_floating_point():
            continue
        before, after = one.narrow(axis, 0, place), two.narrow(axis, 0, place)
        if not torch.allclose(before, after, rtol=1e-3, atol=1e-5 * float(before.abs().max())):
            return name
    return ""


def is_tokens(leaf: Any) -> bool:
    """Returns whether a part of a micro batch is a tensor of tokens, (samples, tokens)."""
    return (
        isinstance(leaf, Tensor)
        and leaf.dim() == 2
        and leaf.dtype == torch.int64
        and leaf.shape[1] > 2
    )


@torch.no_grad()
def _outputs(step: Callable[..., Any], batch: Any, model: nn.Module) -> dict[str, Tensor]:
    was_training = model.training
    model.eval()
    found: dict[str, Tensor] = {}
    with outputs_of(model, found):
        step(iter([batch]), model)
    model.train(was_training)
    return found


@contextlib.contextmanager
def outputs_of(model: nn.Module, found: dict[str, Tensor]) -> Iterator[None]:
    """Collects the first tensor that each module inside a model returns first, in order of time.

    Those of the model itself are left out: they may be losses, whose labels are the next tokens.
    """
    hooks = []
    for name, module in model.named_modules():
        inner = name.replace("module.", "").removeprefix("module")
        if inner:

            def note(module: nn.Module, inputs: Any, output: Any, name: str = inner) -> None:
                some = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                if some and name not in found:
                    found[name] = some[0].detach().cpu().clone()

            hooks.append(module.register_forward_hook(note))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
