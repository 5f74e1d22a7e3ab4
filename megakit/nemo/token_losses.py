"""Averages losses over tokens: micro batches may differ in their numbers of tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from megatron.core import parallel_state
from nemo.lightning.megatron_parallel import MegatronLossReduction
from torch import Tensor

from megakit.training.means import check_shapes


class TokenReport(TypedDict):
    """Holds a loss's report on one micro batch, if micro batches differ in number of tokens."""

    loss_sum: Tensor
    num_tokens: Tensor
    value_sums: dict[str, Tensor]


class TokenMeanLossReduction(MegatronLossReduction):
    """Averages a loss over all real tokens of a global batch, with equal weight for each token.

    A token is anything that has its own loss: a word, a pixel, an image. This loss returns sums and
    counts, and Megatron divides the gradient by the number of tokens of all micro batches and
    ranks. This requires `calculate_per_token_loss=True` in the model's config.

    Attributes:
        num_tokens: The number of tokens of the last reduced global batch, over all micro batches
            and data-parallel ranks, by which a validation weights its steps. Any other loss may set
            this attribute in its `reduce`.
    """

    num_tokens: Tensor

    def token_losses(self, batch: Any, forward_out: Any) -> Tensor:
        """Returns the loss of each token, floating point (B, ...); a subclass implements this."""
        raise NotImplementedError(f"{type(self).__name__}.token_losses")

    def token_values(self, batch: Any, forward_out: Any) -> dict[str, Tensor]:
        """Returns further values of each token by name, for the log, in the shape of the losses.

        Their means over all real tokens are logged as `train_<name>` and `val_<name>`.
        """
        return {}

    def token_mask(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Returns a mask that is above 0 for real tokens; None if all tokens are real.

        The mask has the shape of the losses (B, ...), or their leading dimensions. The default is
        `batch["loss_mask"]`, from the dataset, or in evaluation from the data loader.
        """
        return batch.get("loss_mask")

    def forward(
        self, batch: Mapping[str, Tensor], forward_out: Any
    ) -> tuple[Tensor, Tensor, TokenReport]:
        """Returns the loss sum to backpropagate, the token count (int32 scalar), and the report."""
        losses = self.token_losses(batch, forward_out).float()
        mask = self.token_mask(batch)
        real = torch.ones_like(losses, dtype=torch.bool)
        if mask is not None:
            missing = losses.dim() - mask.dim()
            real = (mask > 0).reshape(*mask.shape, *[1] * missing).expand_as(losses)

        def exact_sum(values: Tensor) -> Tensor:
            # Not a product: outputs for padding may be infinite, and infinity times 0 is NaN.
            return values.masked_fill(~real, 0).sum(dtype=torch.float64)

        loss_sum = exact_sum(losses)
        num_tokens = real.sum(dtype=torch.int32)
        values = self.token_values(batch, forward_out).items()
        for name, value in values:
            check_shapes(f"token value {name!r}", value, "the loss", losses, "Reshape one of them.")
        report: TokenReport = {
            "loss_sum": loss_sum.detach(),
            "num_tokens": num_tokens,
            "value_sums": {name: exact_sum(value.detach()) for name, value in values},
        }
        return loss_sum.float(), num_tokens, report  # Megatron requires a float32 loss

    def reduce(
        self, losses_reduced_per_micro_batch: Sequence[TokenReport]
    ) -> Tensor | dict[str, Tensor]:
        """Averages the reports over the tokens of a global batch; without tokens, the mean is 0."""
        reports = losses_reduced_per_micro_batch
        names = list(reports[0]["value_sums"])
        rows = [(r["num_tokens"], r["loss_sum"], *r["value_sums"].values()) for r in reports]
        totals = torch.stack([torch.stack([value.double() for value in row]) for row in rows]).sum(
            0
        )
        if parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            torch.distributed.all_reduce(totals, group=group)
        self.num_tokens = totals[0]
        loss, *means = (totals[1:] / totals[0].clamp(min=1)).float().unbind()
        return {"loss": loss, **dict(zip(names, means, strict=True))} if names else loss
