"""Sizes of the vision transformer, for the scripts' stages and for the models' config."""

HIDDEN_SIZE = 64  # numbers per token; tensor parallelism divides them
NUM_HEADS = 4  # attention heads, which tensor parallelism deals out
NUM_LAYERS = 4  # transformer layers, which pipeline parallelism deals out
