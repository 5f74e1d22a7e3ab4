"""Runs the micro batches of a step without what Megatron's schedule does for few models.

Megatron's schedule of one stage asks in each micro batch for experts, timers and the layers of a
Transformer, and multiplies and divides the loss by 1. For a small model, this takes a fifteenth of
a step.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model

from megakit.runtime.patching import record

#: Options of a model's config for which Megatron's schedule does more than run the passes.
_SPECIAL = ("calculate_per_token_loss", "enable_autocast", "grad_scale_func", "num_moe_experts")


@functools.cache
def is_used() -> bool:
    """Returns whether the short schedule may be used, and records it as a patch."""
    return record(
        schedules.__name__,
        "forward_backward_no_pipelining",
        group="fast",
        reason="it asks in each micro batch for what few models have",
        worth="7% of a step",
        when="in the training of a model without Transformer layers, in one process or on "
        "data-parallel ranks without overlap",
    )


def shortened(schedule: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Returns a schedule for training that computes the same bits as Megatron's.

    Args:
        schedule: Megatron's, which is returned if it has more to do, or if a program has replaced
            it, such as one that traces a step.
        model: This rank's model, as NeMo has wrapped it.
    """
    config = model.config
    more = [getattr(config, name, None) for name in _SPECIAL]
    more.append(getattr(config.timers, "_log_level", 0))  # 0: nothing is timed
    more.append(parallel_state.get_data_parallel_world_size() < torch.distributed.get_world_size())
    code = getattr(schedule, "__code__", None)
    more.append(getattr(code, "co_filename", "") != schedules.__file__)
    for part in model.modules():
        overlaps = isinstance(part, DistributedDataParallel) and part.ddp_config.overlap_grad_reduce
        more.append(overlaps or isinstance(part, TransformerLayer))
    if any(more) or not is_used():
        return schedule
    set_input_tensor = get_attr_wrapped_model(model, "set_input_tensor")

    def run(
        forward_step_func: Callable[..., Any],
        model: Any,
        data_iterator: Iterator[Any],
        num_microbatches: int,
        **unused: Any,
    ) -> list[Any]:
        reports = []
        for _ in range(num_microbatches):
            set_input_tensor([None])
            output, loss_of = forward_step_func(data_iterator, model)
            loss, *counts, report = loss_of(output)
            reports.append(report)
            for count in counts:  # of samples, if the loss returns it
                loss /= count.clamp(min=1)
            if num_microbatches > 1:
                loss /= num_microbatches
            if loss.requires_grad:
                loss.backward()
        config.finalize_model_grads_func([model])
        return reports

    return run
