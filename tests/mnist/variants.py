"""Classifiers that a reader may make of the tutorial's. Imported once Megatron is set up."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megakit.models import seeded
from model_components import ExampleFineTuneConfig, ExampleFineTuneModel, ExampleModelTrunk


class ChangedTrunk(ExampleModelTrunk):
    """The trunk with a layer after its last."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.variant = config.variant
        with seeded(config.seed, "extra"):
            size = config.latent_size
            self.extra = nn.Linear(size, size)
            self.convolution = nn.Conv1d(size, size, 1)

    def forward(self, x: Tensor) -> Any:
        z = super().forward(x)
        if self.variant == "layer":
            return torch.tanh(self.extra(z)) - z
        if self.variant == "convolution":
            return self.convolution(z.unsqueeze(-1)).squeeze(-1)
        return z


class Variant(ExampleFineTuneModel, ChangedTrunk):
    """The tutorial's classifier on the changed trunk."""


@dataclass
class VariantConfig(ExampleFineTuneConfig):
    model_cls: type[Variant] = Variant
    variant: str = "layer"


class WithoutLatents(ExampleFineTuneModel):
    """A classifier that returns logits alone."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)


@dataclass
class WithoutLatentsConfig(ExampleFineTuneConfig):
    model_cls: type[WithoutLatents] = WithoutLatents
