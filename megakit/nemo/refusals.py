"""Refuses what would train wrongly, or would never be called."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer import TransformerConfig
from nemo import lightning as nl
from nemo.lightning.megatron_parallel import CallbackMethods, MegatronLossReduction
from nemo.lightning.pytorch.plugins import MegatronDataSampler

from megakit.errors import UserError
from megakit.nemo.losses import MeanLossReduction
from megakit.nemo.token_losses import TokenMeanLossReduction
from megakit.training.means import FirstMask


def refuse_listeners(strategy: nl.MegatronStrategy) -> None:
    """Refuses whoever listens to NeMo's events of a step, which nobody would tell them.

    Raises:
        UserError: A callback or the data sampler needs an event.
    """
    if getattr(strategy.data_sampler, "rampup_batch_size", None):
        raise UserError(
            "The data sampler has a rampup_batch_size, which needs NeMo's events of a step. Leave "
            "it out, or use nl.MegatronStrategy."
        )
    for event, listeners in strategy.model.callbacks.callbacks.items():
        known = {getattr(cls, event, None) for cls in (CallbackMethods, MegatronDataSampler)}
        for listener in listeners:
            if getattr(type(listener), event) not in known:
                raise UserError(
                    f"{type(listener).__name__}.{event}: ExactStrategy does not call this. Use "
                    "`trainer.strategy.observers`, or nl.MegatronStrategy."
                )


def refuse_wrong_gradients(config: object, model: torch.nn.Module, loss: object) -> None:
    """Refuses three settings of a transformer's config that would give wrong gradients.

    Raises:
        UserError: The model has the whole sequence on each of the ranks that divide it, the
            gradient of a mean is divided by the number of tokens, or that of a sum is not.
    """
    if not isinstance(config, TransformerConfig):
        return
    is_first = parallel_state.is_pipeline_first_stage()
    if config.sequence_parallel and is_first and not any(map(_divides_sequence, model.modules())):
        raise UserError(
            "sequence_parallel=True: no layer of the model divides the sequence over the "
            "tensor-parallel ranks. Leave it out. Or divide the sequence after the embedding by "
            "Megatron's scatter_to_sequence_parallel_region, and set `divides_sequence = True` in "
            "the class of the model."
        )
    if config.calculate_per_token_loss and isinstance(loss, MeanLossReduction):
        raise UserError(
            f"calculate_per_token_loss=True: {type(loss).__name__} returns means, not sums and "
            "token counts. Leave it out, or derive the loss from TokenMeanLossReduction."
        )
    if isinstance(loss, TokenMeanLossReduction) and not config.calculate_per_token_loss:
        raise UserError(
            f"{type(loss).__name__} needs calculate_per_token_loss=True in the model's config: "
            "without it, Megatron averages over micro batches, and tokens get unequal weights."
        )


def check_mask(batch: Any, loss: MegatronLossReduction) -> tuple[Any, Callable[..., Any]]:
    """Returns an evaluation batch and the loss's `forward`, which checks that the mask is used.

    The returned `forward` raises a UserError if there is padding and nothing has used the batch's
    `loss_mask`, neither the model nor the loss.
    """
    if not isinstance(batch, dict) or "loss_mask" not in batch:
        return batch, loss.forward
    mask: torch.Tensor = batch["loss_mask"]
    FirstMask.used = False

    def forward(batch: Any, output: Any) -> Any:
        result = loss.forward(batch, output)
        if not FirstMask.used and (mask != 1).any():
            raise UserError(
                f"{type(loss).__name__} does not use batch['loss_mask'], so padding would count in "
                "the evaluation. Multiply the loss of each sample by its weight there before "
                "taking the mean, or derive the loss from MeanLossReduction, which does so, or "
                "TokenMeanLossReduction."
            )
        return result

    first = copy.copy(batch)  # of the same class
    first["loss_mask"] = mask.as_subclass(FirstMask)
    return first, forward


def _divides_sequence(module: torch.nn.Module) -> bool:
    if isinstance(module, LanguageModelEmbedding):
        return bool(module.scatter_to_sequence_parallel)
    return getattr(module, "divides_sequence", False) is True
