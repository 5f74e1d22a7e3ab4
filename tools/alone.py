"""Says what is wrong in a step of one process, without a second one to compare it with."""

from collections.abc import Iterator

import torch

from .steps import MOST, Finding, Step


def judge_alone(step: Step) -> Iterator[Finding]:
    """Yields what is wrong in a step of one process without any other."""
    one = step.ranks[0]
    names = [name for name, *_ in one["pieces"]]
    if one["leak"]:
        text = f"outputs of {one['leak']} change with a later token"
        yield Finding("causality", text, "the mask lets a token see those after it")
    if left := one["left"]:
        text = f"a step begins with those of the step before, of {len(left)} weights"
        yield Finding("gradients", text, "", left[:3])
    tensors = [one["tensors"][kind] for kind in ("gradient", "weight", "updated")]
    reached = zip(names, one["reached"], tensors[0], strict=True)
    if unreached := [name for name, is_it, gradient in reached if not is_it and not gradient.any()]:
        text = f"no backward pass reaches {len(unreached)} of {len(names)} weights"
        cause = "they are not used, or what they compute is detached"
        yield Finding("gradients", text, cause, step.with_lines(unreached))
    same = [
        name
        for name, gradient, old, new in zip(names, *tensors, strict=True)
        if gradient.any() and torch.equal(old, new)
    ]
    if len(same) == len(names) and not one["stepped"]:
        cause = "Megatron's DistributedDataParallel leaves `grad` empty: use get_megatron_optimizer"
        yield Finding("update", "no weight changes", cause)
    elif 0 < len(same) < len(names):
        text = f"{len(same)} of {len(names)} weights do not change"
        cause = "the optimizer does not have them, or has them with a learning rate of 0"
        yield Finding("update", text, cause, step.with_lines(same))


def notes_of(step: Step) -> Iterator[str]:
    """Yields what may be intended in a step of one process."""
    one = step.ranks[0]
    counts = {*one["counts"]} - {0}
    if len(counts) > 1 and not any(count for _, count in one["losses"]):
        yield (
            f"each micro batch is divided by its own number of tokens, {min(counts)} to "
            f"{max(counts)}, so the loss depends on how samples are divided into micro batches; "
            "calculate_per_token_loss=True divides by the tokens of the step"
        )
    if empty := [name for _, name, _, value in step.parts("gradient") if not value.any()]:
        yield f"the gradient is 0 of {', '.join(empty[:MOST])}"
    if one["tokens"] and one["leak"] is None:
        yield "causality was not checked, since no module says that it is causal (--causal)"
    pairs = zip(one["tensors"]["weight"], one["tensors"]["updated"], strict=True)
    if one["stepped"] and all(torch.equal(old, new) for old, new in pairs):
        yield "no weight changes in this step (is its learning rate 0?), so no update was compared"
