"""Classifiers that a reader may make of the tutorial's. Imported once Megatron is set up."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from model_components import ExampleFineTuneConfig, ExampleFineTuneModel


class WithoutLatents(ExampleFineTuneModel):
    """A classifier that returns logits alone."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)


@dataclass
class WithoutLatentsConfig(ExampleFineTuneConfig):
    model_cls: type[WithoutLatents] = WithoutLatents


class Doubled(ExampleFineTuneModel):
    """A classifier of the same layers that is no chain of them."""

    def forward(self, x: Tensor, return_latent: bool = False) -> Any:
        return super().forward(2 * x, return_latent)


@dataclass
class DoubledConfig(ExampleFineTuneConfig):
    model_cls: type[Doubled] = Doubled


class WithTanh(ExampleFineTuneModel):
    """A classifier with another activation function."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.relu = nn.Tanh()  # type: ignore[assignment]


@dataclass
class WithTanhConfig(ExampleFineTuneConfig):
    model_cls: type[WithTanh] = WithTanh
