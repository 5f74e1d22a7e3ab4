"""Replaces Megatron's layers by plain torch layers with the same weights and names.

Megatron's linear layers and attention use the parallel state in each call. On one rank this has no
effect. So for inference these layers are replaced in place; the rest of the model is not changed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.attention import CrossAttention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megakit.errors import UserError
from megakit.models.attention import ScaledDotProductAttention
from megakit.models.layers import _ColumnParallel, _RowParallel
from megakit.runtime.patching import require_attribute

#: Packages whose layers may need a parallel state or a GPU. A layer of these packages must be in
#: `REPLACED` or `HARMLESS`.
FOREIGN = ("megatron", "transformer_engine", "apex")

#: Layers that need no parallel state and no GPU after the layers inside them are replaced.
HARMLESS: tuple[type[nn.Module], ...] = (
    *(GPTModel, LanguageModelEmbedding),
    *(TransformerBlock, TransformerLayer, SelfAttention, CrossAttention, MLP),
    *(IdentityOp, IdentityFuncOp, L2Norm),
)


class Linear(nn.Linear):
    """torch's linear layer with the interface of Megatron's: a call returns (output, bias)."""

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would allocate weights
        self.in_features, self.out_features = layer.input_size, layer.output_size
        self.weight, self.bias = layer.weight, layer.bias
        self.skip_bias_add = layer.skip_bias_add

    def forward(  # type: ignore[override]  # returns two results, torch's layer returns one
        self, input: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output, and the bias if `skip_bias_add`; `weight` overrides the layer's."""
        weight = self.weight if weight is None else weight
        if self.skip_bias_add:
            return nn.functional.linear(input, weight), self.bias
        return nn.functional.linear(input, weight, self.bias), None


class Attention(nn.Module):
    """Megatron's DotProductAttention without dropout, on torch's own function where possible."""

    def __init__(self, layer: DotProductAttention) -> None:
        super().__init__()
        # Megatron can divide the scores by the layer's number and multiply them by it again in its
        # softmax.
        self.scale = layer.softmax_scale * (layer.scale_mask_softmax.scale or 1)
        self.is_causal = layer.scale_mask_softmax.attn_mask_type == AttnMaskType.causal
        self.groups = layer.num_query_groups_per_partition
        self.heads = layer.num_attention_heads_per_partition

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """Maps q, k, v (sequence, batch, heads, width) to (sequence, batch, heads * width).

        In a causal layer with more keys than queries, the queries are the last tokens: Megatron's
        inference context supplies the keys of the tokens before them.

        The mask is broadcast to (batch, heads, queries, keys). It is True for masked keys.
        """
        if self.heads != self.groups:
            key = key.repeat_interleave(self.heads // self.groups, dim=2)
            value = value.repeat_interleave(self.heads // self.groups, dim=2)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if attention_mask is not None:
            # Megatron's value, not -inf. A query whose keys are all masked has a result then.
            scores = (query @ key.transpose(2, 3) * self.scale).masked_fill(attention_mask, -1e4)
            return (scores.softmax(dim=-1) @ value).permute(2, 0, 1, 3).flatten(2)
        is_causal, visible = self.is_causal, None
        num_queries, num_keys = query.shape[2], key.shape[2]
        if is_causal and num_queries != num_keys:
            is_causal = False
            visible = query.new_ones(num_queries, num_keys, dtype=torch.bool)
            visible = visible.tril(num_keys - num_queries)
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=is_causal, scale=self.scale
        )
        return attended.permute(2, 0, 1, 3).flatten(2)


class Rotary(RotaryEmbedding):
    """Megatron's rotary embedding without its cache, which would fix the length of sequences."""

    def __init__(self, layer: RotaryEmbedding) -> None:
        nn.Module.__init__(self)
        self.rotary_interleaved = layer.rotary_interleaved
        self.seq_len_interpolation_factor = layer.seq_len_interpolation_factor
        # Moves with the model, unlike Megatron's, and is not in the state dict, like Megatron's.
        self.register_buffer("inv_freq", layer.inv_freq, persistent=False)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False) -> Tensor:
        """Returns the angles (sequence, 1, 1, width) of the positions from `offset` on."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        angles = (
            angles.repeat_interleave(2, dim=1)
            if self.rotary_interleaved
            else torch.cat((angles, angles), dim=1)
        )
        return angles[:, None, None, :]


def _token_losses(labels: Tensor, logits: Tensor) -> Tensor:
    """Returns the losses (batch, sequence), as Megatron's `LanguageModule` does.

    Args:
        labels: int64 (batch, sequence).
        logits: (sequence, batch, vocabulary).
    """
    return nn.functional.cross_entropy(logits.permute(1, 2, 0).float(), labels, reduction="none")


def _embedding(layer: VocabParallelEmbedding) -> nn.Embedding:
    return nn.Embedding(layer.num_embeddings, layer.embedding_dim, _weight=layer.weight)


#: Layer classes and the functions that build their replacements. A subclass that overrides
#: `forward` is refused, because it may compute something else.
REPLACED: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    _ColumnParallel: Linear,
    _RowParallel: Linear,
    ColumnParallelLinear: Linear,
    RowParallelLinear: Linear,
    VocabParallelEmbedding: _embedding,
    ScaledDotProductAttention: Attention,
    DotProductAttention: Attention,
    RotaryEmbedding: Rotary,
}


#: Attributes of hooks that change a layer's inputs or outputs.
_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


def replace_parallel_layers(model: nn.Module) -> None:
    """Replaces the parallel layers of a model that was built on one rank.

    Raises:
        UserError: Layers of Megatron have no torch replacement; the error lists them.
    """
    unknown = list(_replace_children(model, ""))
    if unknown:
        raise UserError(
            f"{type(model).__name__}: these layers cannot be replaced by torch layers: "
            f"{', '.join(unknown)}. Use other layers, for example torch's own, or add a "
            "replacement to megakit/models/plain.py."
        )
    loss = require_attribute(
        LanguageModule, "compute_language_model_loss"
    )  # uses the parallel state
    for layer in model.modules():
        if isinstance(layer, LanguageModule) and type(layer).compute_language_model_loss is loss:
            layer.compute_language_model_loss = _token_losses


def _replace_children(parent: nn.Module, prefix: str) -> Iterator[str]:
    """Replaces the layers inside a module; yields the layers without a plain form."""
    # Not `named_children`, which skips the second name of a shared layer.
    for name, layer in list(require_attribute(parent, "_modules").items()):
        if layer is None:
            continue
        kind = next((kind for kind in REPLACED if isinstance(layer, kind)), None)
        if kind and type(layer).forward is kind.forward and not _has_unsupported_feature(layer):
            replacement = REPLACED[kind](layer)
            for hooks in _HOOKS:  # for example a low-rank correction
                require_attribute(replacement, hooks).update(require_attribute(layer, hooks))
            setattr(parent, name, replacement)
        elif (kind or _is_foreign(layer)) and type(layer) not in HARMLESS:
            yield f"{prefix}{name} ({type(layer).__name__})"
        else:
            yield from _replace_children(layer, f"{prefix}{name}.")


def _is_foreign(layer: nn.Module) -> bool:
    return type(layer).__module__.partition(".")[0] in FOREIGN


def _has_unsupported_feature(layer: nn.Module) -> bool:
    """Tells whether a layer uses a feature that its replacement lacks."""
    if isinstance(layer, DotProductAttention):
        has_window = layer.scale_mask_softmax.window_size is not None
        return has_window or layer.config.softmax_type != "vanilla"
    if isinstance(layer, VocabParallelEmbedding):
        return bool(layer.reduce_scatter_embeddings)
    return False
