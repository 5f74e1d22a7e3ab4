"""The language model of `examples/gpt` in plain PyTorch, and its training as a plain loop."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # Megatron orders the outputs by head: the query, key and value of a head are neighbours.
        qkv = self.qkv(x).view(batch, length, self.heads, -1).transpose(1, 2)
        query, key, value = qkv.chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return attended


class Block(nn.Module):
    """A transformer layer, normalized before attention and before the MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PlainGpt(nn.Module):
    """Predicts the next token; the output layer shares the weights of the embedding."""

    def __init__(self, layers: int, width: int, heads: int, block_size: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens (B, S) to logits (B, S, 256)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


#: Megatron's names of weights, by the beginnings of this model's.
NAMES = {
    "tokens.": "embedding.word_embeddings.",
    "positions.": "embedding.position_embeddings.",
    "blocks.": "decoder.layers.",
    "norm.": "decoder.final_layernorm.",
    "norm1.": "input_layernorm.",
    "norm2.": "pre_mlp_layernorm.",
    "attention.qkv.": "self_attention.linear_qkv.",
    "attention.proj.": "self_attention.linear_proj.",
    "mlp.0.": "mlp.linear_fc1.",
    "mlp.2.": "mlp.linear_fc2.",
}


def megatron_name(name: str) -> str:
    """Returns Megatron's name, such as decoder.layers.1.input_layernorm.bias."""
    if name.startswith("blocks."):
        _, number, inner = name.split(".", 2)
        return f"decoder.layers.{number}.{megatron_name(inner)}"
    begin = max((part for part in NAMES if name.startswith(part)), key=len)
    return NAMES[begin] + name.removeprefix(begin)


def plain_gpt(config: Any, weights: Mapping[str, Tensor]) -> PlainGpt:
    """The model with the sizes of a config and the weights of Megatron's model."""
    model = PlainGpt(
        config.num_layers, config.hidden_size, config.num_attention_heads, config.block_size
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weights[megatron_name(name)])
    return model
