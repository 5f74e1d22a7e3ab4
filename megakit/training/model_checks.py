"""Refuses models that would train wrongly without an error, or fail at their first save."""

from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from megakit.errors import UserError
from megakit.training.losses import MeanLossReduction

#: Which weights of a transformer layer are trained, by name.
Trained = tuple[tuple[str, bool], ...]


def check_model(config: object, model: nn.Module, loss: object) -> None:
    """Checks a built model before it is trained; all ranks of a pipeline have to call this.

    Args:
        config: The model's config, with the layout.
        model: This rank's part of the model.
        loss: The loss of training.

    Raises:
        UserError: The model does not fit sequence parallelism, its loss, or Megatron's checkpoints.
    """
    if not isinstance(config, TransformerConfig):
        return
    problems = [
        *_sequence_problems(config, model),
        *_loss_problems(config, loss),
        *_frozen_problems(config, model),
    ]
    if problems:
        raise UserError(problems)


def _sequence_problems(config: TransformerConfig, model: nn.Module) -> Iterator[str]:
    """Yields a problem if the first stage does not divide the sequence."""
    is_first = parallel_state.is_pipeline_first_stage()
    if config.sequence_parallel and is_first and not any(map(_divides_sequence, model.modules())):
        yield (
            f'strategy={{"sequence_parallel": True}}: no layer of {type(config).__name__}\'s model '
            "divides the sequence over the tensor-parallel ranks, so gradients would be wrong. "
            "Leave the option out. Or divide the sequence after the embedding, by Megatron's "
            "scatter_to_sequence_parallel_region, and set `divides_sequence = True` in the class "
            "of the model."
        )


def _divides_sequence(module: nn.Module) -> bool:
    if isinstance(module, LanguageModelEmbedding):
        return bool(module.scatter_to_sequence_parallel)
    return getattr(module, "divides_sequence", False) is True


def _loss_problems(config: TransformerConfig, loss: object) -> Iterator[str]:
    """Yields a problem if Megatron would add the gradients of ranks that have to be averaged."""
    if config.calculate_per_token_loss and isinstance(loss, MeanLossReduction):
        yield (
            f"{type(config).__name__}.calculate_per_token_loss is True, and "
            f"{type(loss).__name__} returns means, not sums and token counts: gradients would be "
            "too large. Leave the field out, or derive the loss from TokenMeanLossReduction."
        )


def _frozen_problems(config: TransformerConfig, model: nn.Module) -> Iterator[str]:
    """Yields a problem if only some layers are trained.

    Megatron stores the weights of all layers as one tensor, and fails if the optimizer has a state
    for some layers only.
    """
    own = {
        tuple((name, weight.requires_grad) for name, weight in layer.named_parameters())
        for block in model.modules()
        if isinstance(block, TransformerBlock)
        for layer in block.layers
    }
    if len(_of_all_stages(own)) > 1 and not config.hetereogenous_dist_checkpoint:
        yield (
            f"{type(config).__name__}: some of the transformer layers have frozen weights that "
            "other layers train. Megatron cannot save their optimizer in one tensor. Set "
            "hetereogenous_dist_checkpoint=True in the config, or freeze the same weights in all "
            "layers."
        )


def _of_all_stages(patterns: set[Trained]) -> set[Trained]:
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    gathered: list[set[Trained]] = [patterns] * num_stages
    if num_stages > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.all_gather_object(gathered, patterns, group=group)
    return set().union(*gathered)
