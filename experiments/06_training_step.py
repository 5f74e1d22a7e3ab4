"""6. A `training_step` that returns the output, and no `backward`.

In Lightning, `training_step` returns the loss. Does the error tell you that NeMo expects the
model's output instead? And what happens if `training_step` calls `backward` itself?

Neither error names `training_step`. The loss object receives the loss instead of the output. In the
other run, the backward pass of Megatron's schedule is the second one.

Try: call `backward(retain_graph=True)`. Is the error gone? Does the loss show that the gradients
are wrong?
"""

from typing import Any

from torch.nn.functional import mse_loss

from experiments.training import train
from model_components import BionemoLightningModule


def loss_of(batch: Any, output: Any) -> Any:
    """Returns the loss of one micro batch."""
    return mse_loss(output["x_hat"], batch["data"].flatten(1))


class ReturnsLoss(BionemoLightningModule):
    """Returns the loss, as in Lightning."""

    def training_step(self, batch: Any, batch_idx: int | None = None) -> Any:
        return loss_of(batch, self(batch))


class CallsBackward(BionemoLightningModule):
    """Computes the gradients, and returns the output."""

    def training_step(self, batch: Any, batch_idx: int | None = None) -> Any:
        output = self(batch)
        loss_of(batch, output).backward()
        return output


def with_output() -> str:
    """`training_step` returns the model's output."""
    return train(module=BionemoLightningModule).loss


def without_output() -> str:
    """`training_step` returns a loss."""
    return train(module=ReturnsLoss).loss


def without_backward_of_the_schedule() -> str:
    """`training_step` calls `backward`, and returns the output."""
    return train(module=CallsBackward).loss
