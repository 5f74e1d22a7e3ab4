"""Provides Megatron's transformers with initial weights that do not depend on the layout."""

import copy
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megakit.models.attention import ScaledDotProductAttention
from megakit.models.layers import _ColumnParallel, _RowParallel
from megakit.models.seeding import seeded


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


class Norm(WrappedTorchNorm):
    """Builds torch's `LayerNorm` or `RMSNorm`, selected by `config.normalization`.

    With sequence parallelism, which Megatron's class refuses, each rank normalizes different
    tokens. Megatron sums the gradients of weights with the attribute `sequence_parallel`.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **options: Any
    ) -> Any:
        """Returns the norm over the last dimension, of size `hidden_size`."""
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = super().__new__(cls, without, hidden_size, eps, **options)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm


#: Megatron's modules, and the modules of this package that replace them.
_REPLACEMENTS: dict[type, type] = {
    ColumnParallelLinear: _ColumnParallel,
    RowParallelLinear: _RowParallel,
    DotProductAttention: ScaledDotProductAttention,
    WrappedTorchNorm: Norm,
}


def transformer_layer_spec(mask: AttnMaskType = AttnMaskType.no_mask) -> ModuleSpec:
    """Returns the specification of the layers for Megatron's `TransformerBlock`.

    The layers use Transformer Engine's modules if Transformer Engine and a GPU are available. The
    mask is `no_mask` for an encoder, in which every token attends to all tokens, and `causal` for a
    decoder that predicts the next token.
    """
    if _has_transformer_engine():
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec()
    return _seeded_spec(spec, mask)


def transformer_block_spec(
    config: TransformerConfig, mask: AttnMaskType, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the layers of this pipeline stage and the final norm, for Megatron's `GPTModel`.

    In contrast to `transformer_layer_spec`, the layers follow the config's options, such as
    `normalization` and `qk_layernorm`, and the final norm supports sequence parallelism. For an
    interleaved pipeline, `vp_stage` is the number of the model chunk on this stage.
    """
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=_has_transformer_engine(),
        normalization=config.normalization,
        vp_stage=vp_stage,
    )
    block.layer_specs = [_seeded_spec(spec, mask) for spec in block.layer_specs]
    block.layer_norm = _REPLACEMENTS.get(block.layer_norm, block.layer_norm)
    return block


def _has_transformer_engine() -> bool:
    return bool(gpt_layer_specs.HAVE_TE) and torch.cuda.is_available()


def _seeded_spec(spec: ModuleSpec, mask: AttnMaskType) -> ModuleSpec:
    """Replaces Megatron's modules inside a layer's specification by those of this package."""
    spec.module = SeededTransformerLayer
    spec.submodules.self_attention.params = {"attn_mask_type": mask}
    specs = [spec]
    for one in specs:
        for name, value in vars(one.submodules).items():
            if isinstance(value, ModuleSpec) and value.submodules:
                specs.append(value)
            elif isinstance(value, type):
                setattr(one.submodules, name, _REPLACEMENTS.get(value, value))
    return spec


class SeededGPTModel(GPTModel):
    """A `GPTModel` whose initial weights depend on the config's seed and the weights' names only.

    Its layers are those of `transformer_block_spec`; the arguments are Megatron's.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        # The embedding draws from this seed. The later layers have their own seeds.
        with seeded(config.seed, "embedding"):
            super().__init__(config, *args, **options)

    def setup_embeddings_and_output_layer(self) -> None:
        """Builds the output layer again, seeded by name; then ties it to the embedding."""
        if self.post_process:
            with seeded(self.config.seed, "output layer"):
                self.output_layer = _ColumnParallel(
                    self.config.hidden_size,
                    self.vocab_size,
                    config=self.config,
                    init_method=self.config.init_method,
                    bias=False,
                    gather_output=not self.parallel_output,
                    skip_weight_param_allocation=self.pre_process
                    and self.share_embeddings_and_output_weights,
                    embedding_activation_buffer=self.embedding_activation_buffer,
                    grad_output_buffer=self.grad_output_buffer,
                    tp_group=self.pg_collection.tp,
                )
        super().setup_embeddings_and_output_layer()
