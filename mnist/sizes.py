"""Defines the sizes of both models: options of the scripts, and fields of the models' config.

This module is the only place with the defaults. A checkpoint stores the sizes of its model.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from megakit.job.ranges import Range

SIZE = Range(least=1, most=2**16)


@dataclass(kw_only=True)
class SizeOptions:
    """Sizes of a new model."""

    hidden_size: Annotated[int, SIZE] = 64
    """Width of the layers linear1 and linear3, which tensor parallelism divides."""

    latent_size: Annotated[int, SIZE] = 3
    """Size of the latent vector z, from which the decoder reconstructs an image."""


@dataclass(kw_only=True)
class CheckpointSizeOptions:
    """Sizes for a script that starts from a checkpoint or, on request, from random weights."""

    hidden_size: Annotated[int | None, SIZE] = None
    """With --checkpoint none: width of the layer linear1, by default as in pretraining.
    Otherwise the checkpoint decides."""

    latent_size: Annotated[int | None, SIZE] = None
    """With --checkpoint none: size of the latent vector z, by default as in pretraining.
    Otherwise the checkpoint decides."""

    model_sizes: ClassVar[tuple[str, ...]] = ("hidden_size", "latent_size")

    def size(self, name: str) -> Any:
        """Returns a size of a model that starts from random weights: the option, or the default."""
        given = getattr(self, name)
        return getattr(SizeOptions, name) if given is None else given
