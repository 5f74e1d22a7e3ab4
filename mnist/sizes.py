"""Defines the sizes of both models: options of the scripts, and fields of the models' config.

This module is the only place with the defaults. A checkpoint stores the sizes of its model.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from megakit.job.option_types import Size

SIZE = Size(least=1, most=2**24)
#: Parts that pipeline parallelism splits a model into: the encoder, and the decoder or the head.
NUM_PARTS = 2


@dataclass(kw_only=True)
class SizeOptions:
    """Sizes of the model."""

    num_layers: ClassVar[int] = NUM_PARTS

    hidden_size: Annotated[int, SIZE] = 64
    """Width of the layers linear1 and linear3, which tensor parallelism divides; by default
    that of the start checkpoint, if there is one."""

    latent_size: Annotated[int, SIZE] = 3
    """Size of the latent vector z, from which the decoder reconstructs an image; by default
    that of the start checkpoint, if there is one."""
