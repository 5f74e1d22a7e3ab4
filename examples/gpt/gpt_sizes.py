"""Defines the model's sizes: options of `model_pretrain.py`, and fields of the model's config."""

from dataclasses import dataclass
from typing import Annotated

from megakit.job import Size

SIZE = Size(least=1, most=2**16)
VOCABULARY = 256  # a token is a byte


@dataclass(kw_only=True)
class SizeOptions:
    """Sizes of the model; by default those of the start checkpoint, if there is one."""

    num_layers: Annotated[int, SIZE] = 4
    """Transformer layers. Pipeline parallelism divides this number."""

    hidden_size: Annotated[int, SIZE] = 128
    """Width of each layer, a multiple of --num-attention-heads."""

    num_attention_heads: Annotated[int, SIZE] = 4
    """Attention heads of each layer. Tensor parallelism divides this number."""

    block_size: Annotated[int, Size(least=2, most=2**20)] = 128
    """Tokens (bytes) in a sample: the longest context of the model."""

    @property
    def seq_length(self) -> int:
        """The length of a sample by Megatron's name; it decides the number of threads on a CPU."""
        return self.block_size


def vocabulary_problems(tensor_parallel: int) -> list[str]:
    """Returns a message if the tensor-parallel ranks cannot divide the vocabulary."""
    if tensor_parallel < 1 or VOCABULARY % tensor_parallel == 0:
        return []
    return [
        f"--tensor-parallel {tensor_parallel}: has to divide the number of tokens in the "
        f"vocabulary, {VOCABULARY}."
    ]
