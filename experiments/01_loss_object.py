"""1. A loss object with `forward` and `reduce`.

What does a step do with `torch.nn.MSELoss()` as the loss object? And two data-parallel ranks train
on different samples: which loss does each rank log if `reduce` does not communicate?

torch's loss has neither of the methods. Without communication, each rank logs the loss of its own
samples, and no error is raised. The weights are not affected, because the gradients come from the
loss that `forward` returns.

Try: add `tensor=2` to the last call of `train`. Do the logged losses still differ?
"""

from typing import Any

import torch

from experiments.training import train
from model_components import MSELossReduction, PretrainConfig

LOSS_OF_TORCH: Any = torch.nn.MSELoss


class NoReport(MSELossReduction):
    """Returns only the loss."""

    def forward(self, batch: Any, forward_out: Any) -> Any:
        loss, _ = super().forward(batch, forward_out)
        return loss


class OwnSamples(MSELossReduction):
    """Averages over the micro batches of this rank, and does not communicate."""

    def reduce(self, losses_reduced_per_micro_batch: Any) -> Any:
        return torch.stack([report["avg"] for report in losses_reduced_per_micro_batch]).mean()


def without_loss_object() -> str:
    """`torch.nn.MSELoss()` as the loss object."""
    return train(PretrainConfig(loss_cls=LOSS_OF_TORCH)).loss


def without_report() -> str:
    """`forward` returns the loss without a report."""
    return train(PretrainConfig(loss_cls=NoReport)).loss


def with_mean_over_ranks() -> str:
    """The logged loss of the first step, with the project's loss object."""
    return f"{train(PretrainConfig(loss_cls=MSELossReduction)).losses[0]:.4f}"


def without_mean_over_ranks() -> str:
    """The logged loss of the first step, with a `reduce` that does not communicate."""
    return f"{train(PretrainConfig(loss_cls=OwnSamples)).losses[0]:.4f}"
