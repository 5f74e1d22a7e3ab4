"""A mean over ranks for losses, and predictions by way of a loss that computes none."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from nemo.lightning.megatron_parallel import MegatronLossReduction
from torch import Tensor


def mean_over_data_parallel_ranks(averages: Sequence[Tensor]) -> Tensor:
    """The mean of micro batches' averages, over all data-parallel ranks as well.

    Without the mean over ranks each rank would log, and choose checkpoints by, a loss of its own.

    Args:
        averages: One scalar for each micro batch, all of equally many samples.

    Returns:
        A float32 scalar, the same on all ranks of the last pipeline stage.
    """
    mean = torch.stack(list(averages)).float().mean()
    num_ranks = parallel_state.get_data_parallel_world_size()
    if num_ranks > 1:
        torch.distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        mean /= num_ranks
    return mean


class PassthroughLossReduction(MegatronLossReduction):
    """Lets a model's output through Megatron's schedule, which only returns what losses report."""

    def forward(self, batch: Any, forward_out: Any) -> tuple[Tensor, Any]:
        """A loss of zero, and the output as it is."""
        return torch.zeros((), device=_first_tensor(forward_out).device), forward_out

    def reduce(self, forward_out: Sequence[Any]) -> Any:
        """The outputs of all micro batches as one, concatenated along the first dimension."""
        return _concatenate(list(forward_out))


class LightningPassthroughPredictionMixin:
    """Gives a Lightning module the loss that makes `trainer.predict` return its outputs."""

    def predict_loss_reduction(self) -> PassthroughLossReduction:
        """The loss that NeMo's strategy asks for when predicting."""
        return PassthroughLossReduction()


def _first_tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return _first_tensor(next(iter(output.values() if isinstance(output, dict) else output)))


def _concatenate(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs)
    if isinstance(first, dict):
        return {key: _concatenate([output[key] for output in outputs]) for key in first}
    return type(first)(_concatenate(list(items)) for items in zip(*outputs, strict=True))
