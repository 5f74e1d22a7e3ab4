"""Means over ranks and tokens for losses, and predictions by way of a loss that computes none."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from megatron.core import parallel_state
from nemo.lightning.megatron_parallel import MegatronLossReduction
from torch import Tensor


def mean_over_data_parallel_ranks(averages: Sequence[Tensor]) -> Tensor:
    """The mean of micro batches' averages, over all data-parallel ranks as well.

    Without the mean over ranks each rank would log, and choose checkpoints by, a loss of its own.

    Args:
        averages: One scalar for each micro batch, all of equally many samples; or one tensor of
            several averages.

    Returns:
        A float32 tensor of the same shape, the same on all ranks of the last pipeline stage.
    """
    mean = torch.stack(list(averages)).float().mean(dim=0)
    num_ranks = parallel_state.get_data_parallel_world_size()
    if num_ranks > 1:
        torch.distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        mean /= num_ranks
    return mean


def mean_reports(reports: Sequence[Mapping[str, Tensor]]) -> Tensor | dict[str, Tensor]:
    """The mean of micro batches' reports, by name, over all data-parallel ranks as well.

    One collective serves all names.

    Args:
        reports: For each micro batch `avg`, the mean loss, and further means by name.

    Returns:
        The mean loss if there is nothing else; else a dict with the mean loss as `loss`.
    """
    names = list(reports[0])
    if names == ["avg"]:
        return mean_over_data_parallel_ranks([report["avg"] for report in reports])
    stacked = [torch.stack([report[name].float() for name in names]) for report in reports]
    means = mean_over_data_parallel_ranks(stacked).unbind()
    return {"loss" if n == "avg" else n: mean for n, mean in zip(names, means, strict=True)}


def mean_over_samples(values: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """The mean of per-sample values over a micro batch, for a loss to report.

    In evaluation, `batch["loss_mask"]` (B,) weighs the samples: 0 for padding, and 1 on average
    over the whole evaluation.

    Args:
        values: One value for each sample, (B,); or several, (B, ...), which are averaged first.
        batch: The micro batch.

    Returns:
        A float32 scalar without a gradient.
    """
    per_sample = values.detach().float().reshape(len(values), -1).mean(dim=1)
    if "loss_mask" in batch:
        weights = batch["loss_mask"]
        # Not a product alone: what a model makes of padding may be infinite.
        per_sample = per_sample.masked_fill(weights <= 0, 0) * weights
    return per_sample.mean()


class SameSizeLossDict(TypedDict):
    """What a loss reports of one micro batch, where all micro batches have the same size."""

    avg: Tensor


class MeanLossReduction(MegatronLossReduction):
    """A mean over samples: a subclass has `forward` return what `report` makes of its criterion."""

    def report(
        self,
        criterion: Callable[..., Tensor],
        output: Tensor,
        target: Tensor,
        batch: Mapping[str, Any],
        **values: Tensor,
    ) -> tuple[Tensor, SameSizeLossDict]:
        """A micro batch's mean loss in float32, to backpropagate and for the log.

        Args:
            criterion: Such as `mse_loss`; called as `criterion(output, target)`, in evaluation with
                `reduction="none"` too.
            output: The model's, (B, ...).
            target: What it should be.
            batch: The micro batch.
            values: Further values of each sample, (B,): `margin=x` logs the mean of x as
                `train_margin` and `val_margin`.
        """
        if "loss_mask" in batch:
            # Only evaluation pads its last batch: there this is 0, and 1 on average over all.
            losses = criterion(output.float(), target, reduction="none")
            loss = (losses.reshape(len(losses), -1).mean(dim=1) * batch["loss_mask"]).mean()
        else:
            loss = criterion(output.float(), target)
        # Megatron divides the first in place by the number of micro batches: hence the clone.
        means: Any = {name: mean_over_samples(value, batch) for name, value in values.items()}
        return loss, {"avg": loss.detach().clone(), **means}

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Any]) -> Any:
        """The means over a global batch: over its micro batches and over data-parallel ranks."""
        return mean_reports(losses_reduced_per_micro_batch)


class TokenReport(TypedDict):
    """What a loss reports of one micro batch, where micro batches hold unequally many tokens."""

    loss_sum: Tensor
    num_tokens: Tensor
    backpropagated: Tensor
    value_sums: dict[str, Tensor]


class TokenMeanLossReduction(MegatronLossReduction):
    """Mean over all real tokens of a global batch, however micro batches and ranks share them.

    A mean of micro batches' means weighs a token by how few others are beside it. This loss gives
    Megatron sums and counts instead, and Megatron divides the gradient by the number of tokens of
    all micro batches and ranks. It does so only where the model's config says
    `calculate_per_token_loss=True`; a step without that is an error.

    A token is whatever has a loss of its own: a word, a pixel, an image.
    """

    def token_losses(self, batch: Any, forward_out: Any) -> Tensor:
        """The loss of each token of a micro batch, floating point (B, ...); a subclass says it."""
        raise NotImplementedError(f"{type(self).__name__}.token_losses")

    def token_values(self, batch: Any, forward_out: Any) -> dict[str, Tensor]:
        """Further values of each token by name, like the losses in shape, for the log.

        Their means over all real tokens are logged as `train_<name>` and `val_<name>`.
        """
        return {}

    def token_mask(self, batch: Any) -> Tensor | None:
        """Which tokens are real: above 0; of shape (B, ...), like the losses or shorter.

        None if all are. The default is `batch["loss_mask"]`, which a dataset may give, and which
        the loader gives in evaluation, to mark padding.
        """
        mask: Tensor | None = batch.get("loss_mask")
        return mask

    def forward(self, batch: Any, forward_out: Any) -> Any:
        """The sum to backpropagate, the number of tokens (int32, scalar), and both for the log."""
        losses = self.token_losses(batch, forward_out).float()
        mask = self.token_mask(batch)
        if mask is None:
            real = torch.ones_like(losses, dtype=torch.bool)
        else:
            missing = losses.dim() - mask.dim()
            real = (mask > 0).reshape(*mask.shape, *[1] * missing).expand_as(losses)
        # Not a product: what a model makes of padding may be infinite.
        loss_sum = losses.masked_fill(~real, 0).sum()
        num_tokens = real.sum(dtype=torch.int32)
        report: TokenReport = {
            "loss_sum": loss_sum.detach().clone(),
            "num_tokens": num_tokens,
            "backpropagated": loss_sum.detach(),
            "value_sums": {
                name: value.detach().float().masked_fill(~real, 0).sum()
                for name, value in self.token_values(batch, forward_out).items()
            },
        }
        return loss_sum, num_tokens, report

    def reduce(
        self, losses_reduced_per_micro_batch: Sequence[TokenReport]
    ) -> Tensor | dict[str, Tensor]:
        """The means over a global batch's tokens; 0 if it has none.

        Returns:
            A float32 scalar, or a dict of them if there are `token_values`; the same on all ranks
            of the last pipeline stage.

        Raises:
            ValueError: Megatron took means of micro batches, for want of the config's field.
        """
        # Each a column: what Megatron made of the sums, in place; counts, sums, further sums.
        names = ("backpropagated", "num_tokens", "loss_sum")
        values = torch.stack(
            [
                torch.stack(
                    [
                        *(report[name].double() for name in names),  # type: ignore[literal-required]
                        *(value_sum.double() for value_sum in report["value_sums"].values()),
                    ]
                )
                for report in losses_reduced_per_micro_batch
            ]
        )
        if not torch.equal(values[:, 2].nan_to_num(), values[:, 0].nan_to_num()):
            raise ValueError(
                f"{type(self).__name__} needs calculate_per_token_loss=True in the model's config: "
                "without it Megatron averages over micro batches, and tokens weigh unequally."
            )
        totals = values[:, 1:].sum(dim=0)
        if parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            torch.distributed.all_reduce(totals, group=group)
        loss, *means = (totals[1:] / totals[0].clamp(min=1)).float().unbind()
        further = losses_reduced_per_micro_batch[0]["value_sums"]
        return {"loss": loss, **dict(zip(further, means, strict=True))} if further else loss


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
