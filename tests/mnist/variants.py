"""Classifiers that a reader may make of the tutorial's. Imported once Megatron is set up."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from model_components import ExampleFineTuneConfig, ExampleFineTuneModel, ExampleModelTrunk


class ConvolvedTrunk(ExampleModelTrunk):
    """The trunk with a layer that the page cannot compute."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.convolution = nn.Conv1d(config.latent_size, config.latent_size, 1)

    def forward(self, x: Tensor) -> Any:
        return self.convolution(super().forward(x).unsqueeze(-1)).squeeze(-1)


class Convolved(ExampleFineTuneModel, ConvolvedTrunk):
    """The tutorial's classifier on the changed trunk."""


@dataclass
class ConvolvedConfig(ExampleFineTuneConfig):
    model_cls: type[Convolved] = Convolved


class WithoutLatents(ExampleFineTuneModel):
    """A classifier that returns logits alone."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)


@dataclass
class WithoutLatentsConfig(ExampleFineTuneConfig):
    model_cls: type[WithoutLatents] = WithoutLatents
