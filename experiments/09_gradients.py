"""9. Gradients in buffers, and a gradient for every weight.

Where is the gradient of a weight after the backward pass? And what does Megatron do if the loss
does not depend on a weight, so the weight gets no gradient?

The gradient is `weight.main_grad`, a part of a buffer. If Megatron communicates during the backward
pass, it waits for all gradients of a bucket, and fails. Otherwise, a missing gradient is 0.

Try: rename the method of `Reading` to `on_train_batch_end(self, *args)`, so it reads after the
optimizer's step. What is `grad` there? And with `precision="bf16-mixed"` in this call of `train`?
"""

from typing import Any

import torch

from experiments.training import train
from model_components import BionemoLightningModule, PretrainConfig, PretrainModel

#: What this rank reads. Each run has processes of its own.
READ: list[Any] = []


class Reading(BionemoLightningModule):
    """Reads an attribute of a weight after the backward pass, before the optimizer's step."""

    attribute = "main_grad"

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight = next(w for name, w in self.named_parameters() if name.endswith("linear1.weight"))
        READ.append(getattr(weight, self.attribute))


class ReadingGrad(Reading):
    """Reads the attribute of plain PyTorch."""

    attribute = "grad"


class Unused(PretrainModel):
    """The autoencoder with a weight, at first 1, on which the loss does not depend."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.unused = torch.nn.Parameter(torch.ones(1))


def gradient(module: type[Reading]) -> str:
    """Trains, and returns what was read of the first step's gradient."""
    train(module=module)
    return str(READ[0] if READ[0] is None else [*READ[0].shape])


def with_main_grad() -> str:
    """The shape of `linear1.weight.main_grad` after the backward pass."""
    return gradient(Reading)


def without_main_grad() -> str:
    """The shape of `linear1.weight.grad` after the backward pass."""
    return gradient(ReadingGrad)


def with_all_gradients() -> str:
    """A gradient for every weight, and communication during the backward pass."""
    return train(PretrainConfig(), overlap_grad_reduce=True).loss


def without_all_gradients() -> str:
    """A weight without a gradient, and communication during the backward pass."""
    return train(PretrainConfig(model_cls=Unused), overlap_grad_reduce=True).loss


def without_all_gradients_at_the_end() -> str:
    """A weight without a gradient, and communication after the backward pass."""
    weight = train(PretrainConfig(model_cls=Unused)).weights["unused"]
    return f"the weight is {weight.item()} after two steps"
