"""A small language model on Megatron's GPTModel. Imported once Megatron is set up."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType

from megakit.models import (
    IOMixinWithGettersSetters,
    MegatronBioNeMoTrainableModelConfig,
    SeededGPTModel,
    transformer_block_spec,
)


class LanguageModel(SeededGPTModel):
    """Tokens to logits, or to losses if labels are given."""

    def __init__(self, config: Any) -> None:
        super().__init__(
            config,
            transformer_block_spec(config, AttnMaskType.causal),
            vocab_size=32,
            max_sequence_length=config.block_size,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=config.tied_weights,
            position_embedding_type=config.positions,
        )

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Logits (B, S, 32) of tokens (B, S); with labels (B, S), the losses (B, S)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        result: torch.Tensor = super().forward(
            tokens, positions, None, labels=labels, runtime_gather_output=True, **options
        )
        return result


@dataclass
class LanguageConfig(
    MegatronBioNeMoTrainableModelConfig[LanguageModel, Any], IOMixinWithGettersSetters
):
    model_cls: type[LanguageModel] | None = LanguageModel
    num_layers: int = 2
    num_attention_heads: int = 4
    hidden_size: int = 16
    init_method_std: float = 0.3
    block_size: int = 24
    tied_weights: bool = True
    positions: str = "learned_absolute"
