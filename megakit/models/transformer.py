"""Provides Megatron's transformer layer with initial weights that do not depend on the layout."""

from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megakit.models.layers import _ColumnParallel, _RowParallel, seeded


class SeededTransformerLayer(TransformerLayer):
    """A layer whose initial weights depend on the config's seed and the layer's number only.

    Megatron draws weights in the order of construction, which depends on the pipeline stage.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        **options: Any,
    ) -> None:
        offset = get_transformer_layer_offset(config, options.get("vp_stage"))
        with seeded(config.seed, f"transformer layer {layer_number + offset}"):
            super().__init__(config, submodules, layer_number, **options)


def transformer_layer_spec(mask: AttnMaskType = AttnMaskType.no_mask) -> ModuleSpec:
    """Returns the specification of the layers for Megatron's `TransformerBlock`.

    The layers use Transformer Engine's modules if Transformer Engine and a GPU are available, else
    Megatron's own modules. Both have the same names of weights, so a checkpoint works with both.

    Args:
        mask: `no_mask` for an encoder, in which every token attends to all tokens; `causal` for a
            decoder that predicts the next token.
    """
    if gpt_layer_specs.HAVE_TE and torch.cuda.is_available():
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec()
        # Linear layers of `megakit.models.layers`, which use torch's matrix product if possible.
        attention, mlp = spec.submodules.self_attention, spec.submodules.mlp
        attention.submodules.linear_qkv = mlp.submodules.linear_fc1 = _ColumnParallel
        attention.submodules.linear_proj = mlp.submodules.linear_fc2 = _RowParallel
    spec.module = SeededTransformerLayer
    spec.submodules.self_attention.params = {"attn_mask_type": mask}
    return spec
