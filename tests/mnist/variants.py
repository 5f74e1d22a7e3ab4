"""A classifier that a reader may make of the tutorial's. Imported once Megatron is set up."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from model_components import ExampleFineTuneConfig, ExampleFineTuneModel


class WithoutLatents(ExampleFineTuneModel):
    """A classifier that returns logits alone."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)


@dataclass
class WithoutLatentsConfig(ExampleFineTuneConfig):
    model_cls: type[WithoutLatents] = WithoutLatents
