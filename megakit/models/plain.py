"""Replaces Megatron's layers by plain torch layers with the same weights and names.

Megatron's linear layers and attention use the parallel state in each call. On one rank this has no
effect. So for inference these layers are replaced in place; the rest of the model is not changed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.nn import functional

from megakit.errors import UserError
from megakit.models.attention import (
    ScaledDotProductAttention,
    fused_attention,
    score_scale,
)
from megakit.runtime.patching import require_attribute

#: Packages whose layers may need a parallel state or a GPU.
FOREIGN = ("megatron", "transformer_engine", "apex")
#: Their layers that need neither after the layers inside them are replaced.
HARMLESS = {
    *("GPTModel", "LanguageModelEmbedding", "TransformerBlock", "TransformerLayer"),
    *("SelfAttention", "CrossAttention", "MLP", "IdentityOp", "IdentityFuncOp", "L2Norm"),
}


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
            return functional.linear(input, weight), self.bias
        return functional.linear(input, weight, self.bias), None


class Attention(nn.Module):
    """Megatron's DotProductAttention without dropout."""

    def __init__(self, layer: DotProductAttention) -> None:
        super().__init__()
        self.scale = score_scale(layer)
        self.is_causal = layer.scale_mask_softmax.attn_mask_type == AttnMaskType.causal

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Maps q, k, v (sequence, batch, heads, width) to (sequence, batch, heads * width).

        The mask is broadcast to (batch, heads, queries, keys). It is True for masked keys.
        """
        if attention_mask is None:
            return fused_attention(query, key, value, is_causal=self.is_causal, scale=self.scale)
        groups = query.shape[2] // key.shape[2]  # each key belongs to a group of queries
        key, value = (tensor.repeat_interleave(groups, dim=2) for tensor in (key, value))
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        # Megatron's value, not -inf. A query whose keys are all masked has a result then.
        scores = (q @ k.transpose(2, 3) * self.scale).masked_fill(attention_mask, -1e4)
        return (scores.softmax(dim=-1) @ v).permute(2, 0, 1, 3).flatten(2)


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
        if self.rotary_interleaved:
            return angles.repeat_interleave(2, dim=1)[:, None, None, :]
        return torch.cat((angles, angles), dim=1)[:, None, None, :]


def _embedding(layer: VocabParallelEmbedding) -> nn.Embedding:
    return nn.Embedding(layer.num_embeddings, layer.embedding_dim, _weight=layer.weight)


def _token_losses(labels: Tensor, logits: Tensor) -> Tensor:
    """Returns losses (batch, sequence) of labels of this shape and logits (sequence, batch, n)."""
    return functional.cross_entropy(logits.permute(1, 2, 0).float(), labels, reduction="none")


#: Megatron's layers, and the functions that build their replacements.
REPLACED: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    ColumnParallelLinear: Linear,
    RowParallelLinear: Linear,
    VocabParallelEmbedding: _embedding,
    ScaledDotProductAttention: Attention,
    DotProductAttention: Attention,
    RotaryEmbedding: Rotary,
}


def replace_parallel_layers(model: nn.Module) -> None:
    """Replaces the parallel layers of a model that was built on one rank.

    Raises:
        UserError: Layers of Megatron have no torch replacement; the error lists them.
    """
    if unknown := list(_replace_children(model, "")):
        raise UserError(
            f"{type(model).__name__}: these layers cannot be replaced by torch layers: "
            f"{', '.join(unknown)}. Use other layers, for example torch's own, or add a "
            "replacement to megakit/models/plain.py."
        )
    # Megatron's function uses the parallel state.
    loss = require_attribute(LanguageModule, "compute_language_model_loss")
    for layer in model.modules():
        if isinstance(layer, LanguageModule) and type(layer).compute_language_model_loss is loss:
            layer.compute_language_model_loss = _token_losses


def _replace_children(parent: nn.Module, prefix: str) -> Iterator[str]:
    """Replaces the layers inside a module; yields the names of those without a plain form."""
    for name, layer in list(parent.named_children()):
        kind = next((kind for kind in REPLACED if isinstance(layer, kind)), None)
        # A subclass with a `forward` of its own may compute something else.
        is_plain = kind is not None and type(layer).forward is kind.forward
        if isinstance(layer, DotProductAttention):
            window, softmax = layer.scale_mask_softmax.window_size, layer.config.softmax_type
            is_plain = is_plain and window is None and softmax == "vanilla"
        is_foreign = type(layer).__module__.startswith(FOREIGN)
        if kind and is_plain:
            plain = REPLACED[kind](layer)
            # Hooks of forward, for example a low-rank correction.
            vars(plain).update((k, v) for k, v in vars(layer).items() if k.startswith("_forward_"))
            setattr(parent, name, plain)
        elif kind or (is_foreign and type(layer).__name__ not in HARMLESS):
            yield f"{prefix}{name} ({type(layer).__name__})"
        else:
            yield from _replace_children(layer, f"{prefix}{name}.")
