"""Averages losses and other values over samples, micro batches and data-parallel ranks."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from torch import Tensor

from megakit.errors import UserError


def mean_over_data_parallel_ranks(averages: Sequence[Tensor]) -> Tensor:
    """Returns the float32 mean of the micro batches' averages over all data-parallel ranks.

    Without the mean over ranks, each rank would log a different loss, and choose checkpoints by it.

    Args:
        averages: One scalar, or one tensor of several averages, for each micro batch. All micro
            batches have the same number of samples.
    """
    num_ranks = parallel_state.get_data_parallel_world_size()
    if len(averages) == num_ranks == 1:  # saves a hundredth of a small model's step
        return averages[0].float()
    mean = torch.stack(list(averages)).float().mean(dim=0)
    if num_ranks > 1:
        torch.distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        mean /= num_ranks
    return mean


def mean_reports(reports: Sequence[Mapping[str, Tensor]]) -> Tensor | dict[str, Tensor]:
    """Averages the reports of micro batches by name, in one collective over data-parallel ranks.

    A report has the mean loss as `avg`, and further means by name. The result is the mean loss, or
    if there are further means, a dict of all means with the mean loss as `loss`.
    """
    names = list(reports[0])
    if names == ["avg"]:
        return mean_over_data_parallel_ranks([report["avg"] for report in reports])
    stacked = [torch.stack([report[name].float() for name in names]) for report in reports]
    means = mean_over_data_parallel_ranks(stacked).unbind()
    return {"loss" if n == "avg" else n: mean for n, mean in zip(names, means, strict=True)}


def check_shapes(name: str, value: Tensor, other_name: str, other: Tensor, remedy: str) -> None:
    """Refuses different shapes that torch broadcasts, because it then computes without an error.

    Raises:
        UserError: The shapes differ, and torch would broadcast them.
    """
    sizes = zip(reversed(value.shape), reversed(other.shape), strict=False)
    if value.shape != other.shape and all(a == b or 1 in (a, b) for a, b in sizes):
        raise UserError(
            f"{name} has the shape {tuple(value.shape)}, and {other_name} {tuple(other.shape)}. "
            "The shapes have to be equal, because torch broadcasts these, which mixes the values "
            f"of different samples. {remedy}"
        )


class FirstMask(Tensor):
    """The `loss_mask` of an evaluation's first step, which records whether anything uses it.

    Only this step has the checks that call the loss function twice, or wait for a GPU.
    """

    used: ClassVar[bool] = False

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        FirstMask.used = True
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def weighted_mean(values: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Returns the mean of per-sample values (B, ...), weighted by the batch's `loss_mask` (B,)."""
    per_sample = values.reshape(len(values), -1).mean(dim=1)
    if "loss_mask" in batch:
        weights = batch["loss_mask"]
        remedy = "Use one value and one weight for each sample, or TokenMeanLossReduction."
        check_shapes("batch['loss_mask']", weights, "the mean of each sample", per_sample, remedy)
        # Outputs for padding may be infinite, and infinity times 0 is NaN.
        per_sample = per_sample.masked_fill(weights <= 0, 0) * weights
    return per_sample.mean()


def mean_over_samples(values: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Returns the float32 mean of per-sample values over a micro batch, without a gradient.

    Args:
        values: One value for each sample, (B,). Several values for each sample, (B, ...), are
            averaged first.
        batch: The micro batch. In evaluation, its `loss_mask` (B,) contains the sample weights: 0
            for padding, and 1 on average over the whole evaluation.
    """
    return weighted_mean(values.detach().float(), batch)
