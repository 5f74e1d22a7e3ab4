"""Defines the vision transformer's sizes, for the scripts' options and for the models' config."""

from typing import ClassVar

HIDDEN_SIZE = 64  # values per token; tensor parallelism divides this number
NUM_HEADS = 4  # attention heads; tensor parallelism divides this number
NUM_LAYERS = 4  # transformer layers; pipeline parallelism divides this number


class SizeOptions:
    """The sizes that a layout has to divide; no option sets them."""

    hidden_size: ClassVar[int] = HIDDEN_SIZE
    num_attention_heads: ClassVar[int] = NUM_HEADS
    num_layers: ClassVar[int] = NUM_LAYERS
