"""Defines the vision transformer's sizes, for the scripts' stages and for the models' config."""

HIDDEN_SIZE = 64  # values per token; tensor parallelism divides this number
NUM_HEADS = 4  # attention heads; tensor parallelism divides this number
NUM_LAYERS = 4  # transformer layers; pipeline parallelism divides this number
