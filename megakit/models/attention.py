"""Computes Megatron's attention with torch's fused function, if the mask allows this."""

import contextlib
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn import functional


class ScaledDotProductAttention(DotProductAttention):
    """Megatron's `DotProductAttention` that computes with `scaled_dot_product_attention`.

    Torch's fused kernels do not store the scores of all pairs of tokens. The result differs from
    Megatron's by rounding only. If the mask is a tensor, if a window limits the attention, or if
    `config.softmax_type` is not `vanilla`, Megatron's own code runs.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        **options: Any,
    ) -> Tensor:
        """Maps queries, keys and values (S, B, heads, width) to (S, B, heads * width).

        Like Megatron, uses the layer's own mask, not `attn_mask_type`. A single query attends to
        all keys: it is the newest token, and the keys come from a cache.
        """
        is_causal = self.attn_mask_type == AttnMaskType.causal
        is_supported = (
            attention_mask is None
            and all(option is None for option in options.values())
            and (self.attn_mask_type == AttnMaskType.no_mask or is_causal)
            and (not is_causal or len(query) in (1, len(key)))
            and self.scale_mask_softmax.window_size is None
            and self.config.softmax_type == "vanilla"
        )
        if not is_supported:
            context: Tensor = super().forward(
                query, key, value, attention_mask, attn_mask_type, **options
            )
            return context
        dropout = self.attention_dropout.p if self.training else 0.0
        # Without sequence parallelism, Megatron draws from the generator of this rank.
        is_forked = dropout > 0 and not self.config.sequence_parallel
        # On CPUs, torch's backward pass is much slower in bfloat16 than in float32.
        is_slow = query.is_cpu and query.dtype == torch.bfloat16
        dtype = torch.float32 if is_slow else query.dtype
        q, k, v = (tensor.to(dtype) for tensor in (query, key, value))
        with get_cuda_rng_tracker().fork() if is_forked else contextlib.nullcontext():
            context = fused_attention(
                q, k, v, is_causal=is_causal, scale=score_scale(self), dropout=dropout
            )
        return context.to(query.dtype)


def score_scale(layer: DotProductAttention) -> float:
    """Returns the factor of the scores; Megatron can divide them by the layer's number before."""
    scale: float = layer.softmax_scale * (layer.scale_mask_softmax.scale or 1)
    return scale


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Maps queries, keys and values (S, B, heads, width) to (S, B, heads * width).

    With fewer queries than keys, the queries of a causal layer are the last tokens: the keys of the
    tokens before them come from a cache.
    """
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    visible = None
    num_queries, num_keys = query.shape[0], key.shape[0]  # `len` would fix them in an export
    if is_causal and num_queries != num_keys:
        visible = query.new_ones(num_queries, num_keys, dtype=torch.bool)
        visible = visible.tril(num_keys - num_queries)
    context = functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=visible,
        dropout_p=dropout,
        is_causal=is_causal and visible is None,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return context.permute(2, 0, 1, 3).flatten(2)
