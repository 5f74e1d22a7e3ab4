"""Runs the micro batches of a step without what Megatron's schedule does for few models.

Megatron's schedule of one stage asks in each micro batch for experts, timers and the layers of a
Transformer, multiplies and divides the loss by 1, and looks after each step for gradients that
tensor-parallel ranks and stages share. For a small model, this takes a tenth of a step.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_layer import TransformerLayer
from nemo.lightning.pytorch.optim import MegatronOptimizerModule

from megakit.runtime.patching import record

#: Options of a model's config for which Megatron's schedule does more than run the passes.
_SPECIAL = ("calculate_per_token_loss", "enable_autocast", "grad_scale_func", "num_moe_experts")


@functools.cache
def is_used() -> bool:
    """Returns whether the short schedule may be used, and records it as a patch."""
    return record(
        "megatron.core.pipeline_parallel.schedules",
        "forward_backward_no_pipelining",
        group="fast",
        reason="it asks in each micro batch for what few models have, and looks after each step "
        "for gradients that ranks share",
        worth="9% of a step",
        when="in the training of a model without Transformer layers, in one process or on "
        "data-parallel ranks",
    )


def short_schedule(module: Any) -> Callable[..., Any] | None:
    """Returns a schedule that computes the same bits; None if only Megatron's does all that is due.

    Args:
        module: The Lightning module, in which NeMo has wrapped the model for this rank.
    """
    parts = list(module.modules())
    wrappers = [part for part in parts if isinstance(part, DistributedDataParallel)]
    finalize = "finalize_model_grads"
    special = [getattr(module.config, name, None) for name in _SPECIAL]
    special += (wrapper.ddp_config.overlap_grad_reduce for wrapper in wrappers)
    special += (isinstance(part, TransformerLayer) for part in parts)
    groups = parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()
    special += (group.size() > 1 for group in groups)
    kept = getattr(type(getattr(module, "optim", None)), finalize, None)
    is_own = kept is not getattr(MegatronOptimizerModule, finalize)
    if any(special) or is_own or len(wrappers) != 1 or not is_used():
        return None

    def run(
        forward_step_func: Callable[..., Any],
        model: Any,
        data_iterator: Iterator[Any],
        num_microbatches: int,
        **unused: Any,
    ) -> list[Any]:
        reports = []
        for _ in range(num_microbatches):
            output, loss_of = forward_step_func(data_iterator, model)
            loss, *samples, report = loss_of(output)
            reports.append(report)
            for number in samples:
                loss /= number.clamp(min=1)
            if num_microbatches > 1:
                loss /= num_microbatches
            if loss.requires_grad:
                loss.backward()
        wrappers[0].finish_grad_sync()
        return reports

    return run
