"""3. A config that builds the model late.

In Lightning, a module usually builds its layers in `__init__`. What happens if a module under NeMo
does so?

The process groups do not exist before `trainer.fit`, so Megatron's layers cannot know which part of
the weights this rank holds.

Try: build the model in Lightning's hook `setup(self, stage)` instead. Is this late enough?
"""

from typing import Any

from experiments.training import train
from model_components import BionemoLightningModule


class Early(BionemoLightningModule):
    """Builds the model in `__init__`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.module = config.configure_model()


def with_late_model() -> str:
    """The model is built in `configure_model`."""
    return train(module=BionemoLightningModule).loss


def without_late_model() -> str:
    """The model is built in `__init__`."""
    return train(module=Early).loss
