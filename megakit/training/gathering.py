"""Brings values from the ranks that have them to the ranks that need them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from torch import Tensor

T = TypeVar("T")
#: A micro batch. The type of a model's output is only known to the model.
Batch = Mapping[str, Tensor]


def from_last_stage(values: T) -> T:
    """Returns the last pipeline stage's values on all stages; every stage has to call this."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return values
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    return _broadcast(values, last, parallel_state.get_pipeline_model_parallel_group())


def from_last_rank(values: T) -> T:
    """Returns one rank's values on all ranks of the model; every rank has to call this.

    For a decision: sums of several process groups may differ in the last bit, also between the
    tensor-parallel ranks of the last stage, and the ranks have to decide alike.
    """
    group = parallel_state.get_model_parallel_group()
    last = torch.distributed.get_world_size(group) - 1
    if last == 0:
        return values
    return _broadcast(values, torch.distributed.get_global_rank(group, last), group)


def _broadcast(values: T, source: int, group: Any) -> T:
    parts = [values]
    torch.distributed.broadcast_object_list(parts, source, group)
    return parts[0]


def means_on_all_ranks(prefix: str, reports: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Returns float32 means over micro batches and data-parallel ranks; every rank calls this.

    Args:
        prefix: What the names of the means begin with.
        reports: On the last pipeline stage, a scalar by name for each micro batch.
    """
    found: dict[str, float] = {}
    if reports:
        rows = torch.stack([torch.stack([*report.values()]) for report in reports])
        means = rows.double().mean(dim=0)
        torch.distributed.all_reduce(means, group=parallel_state.get_data_parallel_group())
        means /= parallel_state.get_data_parallel_world_size()
        found = dict(zip(reports[0], means.float().tolist(), strict=True))
    return {f"{prefix}{name}": value for name, value in from_last_rank(found).items()}


def real_samples(batch: Batch) -> Tensor:
    """Returns a mask of an evaluation batch, True for samples that are not padding: bool (B,)."""
    mask = batch["loss_mask"]
    return (mask > 0).reshape(len(mask), -1).any(dim=1)


def has_outputs() -> bool:
    """Tells whether this rank has model outputs that no other rank has."""
    is_first_shard = parallel_state.get_tensor_model_parallel_rank() == 0
    return is_first_shard and parallel_state.is_pipeline_last_stage()


def gather_from_ranks(value: T) -> list[T]:
    """Returns the values of all ranks on rank 0, and an empty list on other ranks."""
    if (world_size := torch.distributed.get_world_size()) == 1:
        return [value]
    values = [value] * world_size if torch.distributed.get_rank() == 0 else None
    torch.distributed.gather_object(value, values)
    return values or []


def on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces tensors of a GPU by copies on the host; waits once, not for each tensor."""
    copies = {
        # Without page-locked memory, each copy would wait.
        name: torch.empty_like(each, device="cpu", pin_memory=True).copy_(each, non_blocking=True)
        for name, each in values.items()
        if isinstance(each, Tensor) and each.is_cuda
    }
    if copies:
        torch.cuda.current_stream().synchronize()
    return {**values, **copies}
