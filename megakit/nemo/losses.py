"""Defines NeMo's losses: means over samples, and predictions that pass through Megatron."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import torch
from nemo.lightning.megatron_parallel import MegatronLossReduction
from torch import Tensor

from megakit.errors import UserError
from megakit.runtime.patching import require_attribute
from megakit.training.means import (
    FirstMask,
    check_shapes,
    mean_over_samples,
    mean_reports,
    weighted_mean,
)

#: torch's function of nested containers.
_map_with_path = require_attribute("torch.utils._pytree", "tree_map_with_path")


class SameSizeLossDict(TypedDict):
    """Holds a loss's report on one micro batch, if all micro batches have the same size."""

    avg: Tensor


class MeanLossReduction(MegatronLossReduction):
    """Averages a loss over samples; `forward` of a subclass returns the result of `report`."""

    def report(
        self,
        criterion: Callable[..., Tensor],
        output: Tensor,
        target: Tensor,
        batch: Mapping[str, Any],
        **values: Tensor,
    ) -> tuple[Tensor, SameSizeLossDict]:
        """Returns a micro batch's mean loss in float32, to backpropagate and for the log.

        Args:
            criterion: A loss function such as `mse_loss`, called as `criterion(output, target)`. In
                evaluation, the call also has the argument `reduction="none"`.
            output: The model's output, (B, ...).
            target: The correct output: class numbers, or values in the shape of the output.
            batch: The micro batch.
            values: Further values of each sample, (B,): `margin=x` logs the mean of x as
                `train_margin` and `val_margin`.

        Raises:
            UserError: Torch would broadcast target and output to one shape, and the target is
                floating point, or the output has one value for each sample. Or the mean is not
                that of the samples: because of the criterion, or of a mask from the dataset.
        """
        name = type(self).__name__
        if target.is_floating_point() or output.shape[1:].numel() == 1:
            remedy = "Reshape or expand one of them; class numbers have to be integers."
            check_shapes(f"{name}: the target", target, "the output", output, remedy)
        if target.dtype == torch.float64:  # a batch of Python's floats
            target = target.float()
        if "loss_mask" in batch:
            # Only evaluation pads its last batch. The mask is 0 for padding, and 1 on average.
            mask = batch["loss_mask"]
            is_first = isinstance(mask, FirstMask)
            is_trained = output.requires_grad and torch.is_grad_enabled()
            if is_trained or (is_first and (mask[1:] > mask[:-1]).any()):
                raise UserError(
                    f"{name}: the dataset returns a loss_mask. A mean over all samples would count "
                    "what it masks as zeros. Derive the loss from TokenMeanLossReduction, which "
                    "divides by the number of real samples, over all micro batches and ranks."
                )
            losses = criterion(output.float(), target, reduction="none")
            if losses.shape[:1] != output.shape[:1] or losses.numel() > output.numel():
                raise UserError(
                    f"{name}: with reduction='none', the criterion returned "
                    f"{tuple(losses.shape)} for outputs {tuple(output.shape)}. It has to return at "
                    "most one loss for each number of the output, and the samples come first."
                )
            if is_first:
                mean, plain = criterion(output.float(), target), losses.mean()
                if (mean - plain).abs() > 1e-3 * losses.abs().mean():
                    raise UserError(
                        f"{name}: the criterion returned {mean:.6g} for a batch, as in training, "
                        f"and the mean of its losses with reduction='none' is {plain:.6g}, as in "
                        "evaluation. They have to be equal; with class weights or ignore_index "
                        "they are not. Derive the loss from TokenMeanLossReduction, or make both "
                        "equal."
                    )
            loss = weighted_mean(losses, batch)
        else:
            loss = criterion(output.float(), target)
        means: Any = {key: mean_over_samples(value, batch) for key, value in values.items()}
        # Megatron divides the loss in place by the number of micro batches; the log gets a clone.
        return loss, {"avg": loss.detach().clone(), **means}

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Mapping[str, Any]]) -> Any:
        """Averages the reports over the micro batches of a global batch and data-parallel ranks."""
        return mean_reports(losses_reduced_per_micro_batch)


class PassthroughLossReduction(MegatronLossReduction):
    """Passes a model's output through Megatron's schedule, which returns only loss reports.

    The output is a tensor, None, or a dict, list or tuple of outputs, nested to any depth.

    Attributes:
        batch_dims: The batch dimension of all tensors under a key, also in nested containers; 0 for
            tensors under no such key. Megatron's language models return logits of shape
            (sequence, batch, vocabulary).
    """

    batch_dims: ClassVar[Mapping[str, int]] = {"token_logits": 1}

    def setup(self, batch: Any) -> None:
        """Does nothing: NeMo's version would keep the batch in memory by a reference cycle."""

    def forward(self, batch: Mapping[str, Any], forward_out: Any) -> tuple[Tensor, Any]:
        """Returns a loss of zero, and the unchanged output."""
        return torch.zeros(()), forward_out

    def reduce(self, forward_out: Sequence[Any]) -> Any:
        """Concatenates the outputs of all micro batches along the batch dimension."""

        def concatenate(path: Sequence[Any], *parts: Any) -> Tensor | None:
            dim = 0
            for entry in path:
                dim = self.batch_dims.get(getattr(entry, "key", ""), dim)
            return None if parts[0] is None else torch.cat(parts, dim)

        return _map_with_path(concatenate, *forward_out)


class LightningPassthroughPredictionMixin:
    """Adds to a Lightning module the loss with which `trainer.predict` returns the outputs."""

    def predict_loss_reduction(self) -> PassthroughLossReduction:
        """Returns the loss that NeMo's strategy requests for prediction."""
        return PassthroughLossReduction()
