"""Megatron's transformer layer, with first weights that do not depend on the layout."""

from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)

from megakit.models.layers import _ColumnParallel, _RowParallel, seeded


class SeededTransformerLayer(TransformerLayer):
    """A layer whose first weights come from the config's seed and its number in the model.

    Megatron draws weights in the order of construction, so that a layer's would depend on how many
    come before it on the same pipeline stage.
    """

    def __init__(self, config: Any, submodules: Any, layer_number: int = 1, **options: Any) -> None:
        offset = get_transformer_layer_offset(config, options.get("vp_stage"))
        with seeded(config.seed, f"transformer layer {layer_number + offset}"):
            super().__init__(config, submodules, layer_number, **options)


def transformer_layer_spec(mask: AttnMaskType = AttnMaskType.no_mask) -> ModuleSpec:
    """What Megatron's `TransformerBlock` shall build its layers of.

    Transformer Engine's modules where it and a GPU are there, else Megatron's own. The names of the
    weights in a checkpoint are the same, so that one made here can be used there.

    Args:
        mask: `no_mask` for an encoder, in which every token sees all others; `causal` for a decoder
            that predicts the next token.
    """
    if gpt_layer_specs.HAVE_TE and torch.cuda.is_available():
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec()
        # Megatron's two linear layers, with torch's product where that will do.
        attention, mlp = spec.submodules.self_attention, spec.submodules.mlp
        attention.submodules.linear_qkv = mlp.submodules.linear_fc1 = _ColumnParallel
        attention.submodules.linear_proj = mlp.submodules.linear_fc2 = _RowParallel
    spec.module = SeededTransformerLayer
    spec.submodules.self_attention.params = {"attn_mask_type": mask}
    return spec
