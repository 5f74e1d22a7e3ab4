"""A small model on Megatron's TransformerBlock. Imported once Megatron is set up."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlock

from megakit.models import IOMixinWithGettersSetters, MegatronBioNeMoTrainableModelConfig


class Blocks(MegatronModule):
    """Tokens to logits, by Megatron's own embedding and transformer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        torch.manual_seed(config.seed)
        self.embedding = VocabParallelEmbedding(
            12, config.hidden_size, init_method=config.init_method, config=config
        )
        spec = get_gpt_layer_local_spec(normalization=config.normalization)
        mask_type = AttnMaskType.causal if config.is_causal else AttnMaskType.no_mask
        spec.submodules.self_attention.params["attn_mask_type"] = mask_type
        self.decoder = TransformerBlock(
            config,
            spec,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        self.head = torch.nn.Linear(config.hidden_size, 12)
        for weight in self.parameters():  # biases too, which Megatron leaves at zero
            torch.nn.init.normal_(weight, std=0.3)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (S, B, 12) of tokens (S, B)."""
        logits: torch.Tensor = self.head(self.decoder(self.embedding(tokens), attention_mask=mask))
        return logits


@dataclass
class BlocksConfig(MegatronBioNeMoTrainableModelConfig[Blocks, Any], IOMixinWithGettersSetters):
    model_cls: type[Blocks] | None = Blocks
    num_layers: int = 2
    num_attention_heads: int = 4
    hidden_size: int = 16
    is_causal: bool = False
