"""Blocks of tokens that are partly padding, for `tiny_gpt`. Ranks import it by its path.

33 blocks fill no global batch of 6, and only some of their tokens are real.
"""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import parallel_state
from nemo.lightning.megatron_parallel import MegatronLossReduction
from torch import Tensor

from megakit.training import megatron_adam

if TYPE_CHECKING:
    from tests.parallel import tiny_gpt
else:  # a rank does not know the package `tests`
    sys.path.insert(0, str(Path(__file__).parent))
    import tiny_gpt

NUM_BLOCKS, BLOCK = 33, 16


class MaskedBlocks(tiny_gpt.Blocks):
    """Block k has from 1 to 16 real tokens, and the last block one; no block has a `label`."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        sample.pop("label", None)
        num_real = 1 if index == self.number - 1 else 1 + index * index % self.length
        return {**sample, "loss_mask": (torch.arange(self.length) < num_real).float()}


class Data(tiny_gpt.Data):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.val_set = self.test_set = MaskedBlocks(NUM_BLOCKS, BLOCK, first=500)


class BitsLoss(tiny_gpt.NextTokenLoss):
    """A loss with a further value."""

    def token_values(self, batch: Any, forward_out: Any) -> dict[str, Tensor]:
        losses: Tensor = forward_out
        return {"bits": losses / math.log(2)}


class DoubledLoss(tiny_gpt.NextTokenLoss):
    """A loss that takes its base class's result to be a tensor."""

    def reduce(self, losses_reduced_per_micro_batch: Any) -> Any:
        mean: Any = super().reduce(losses_reduced_per_micro_batch)
        return 2 * mean


class MaskedLoss(tiny_gpt.NextTokenLoss):
    """A loss that counts no token."""

    def token_mask(self, batch: Any) -> Tensor:
        mask: Tensor = batch["loss_mask"]
        return mask * 0


class OwnLoss(MegatronLossReduction):
    """A loss with another base class, as its users write it; it names its number of tokens."""

    num_tokens: Tensor | None = None

    def forward(self, batch: Any, forward_out: Any) -> Any:
        real = batch["loss_mask"] > 0
        report = torch.stack([(forward_out * real).sum(), real.sum()])
        return report[0], real.sum(), {"report": report.detach()}

    def reduce(self, losses_reduced_per_micro_batch: Any) -> Any:
        total = torch.stack([one["report"] for one in losses_reduced_per_micro_batch]).sum(dim=0)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        self.num_tokens = total[1]
        return {"loss": total[0] / total[1], "bits": total[0] / total[1] / math.log(2)}


LOSSES: dict[str, Any] = {
    "token mean": tiny_gpt.NextTokenLoss,
    **{"values": BitsLoss, "doubled": DoubledLoss, "masked": MaskedLoss, "own": OwnLoss},
}


class Module(tiny_gpt.GptModule):
    """Predicts the logits of each token."""

    loss = "values"

    def training_loss_reduction(self) -> Any:
        return LOSSES[self.loss]()

    validation_loss_reduction = training_loss_reduction

    def predict_step(self, batch: Any, batch_idx: int | None = None) -> Any:
        logits = self.module(batch["tokens"])
        return {"output": logits, "idx": batch["idx"], "loss_mask": batch["loss_mask"]}


def make_module(loss: str = "values") -> Module:
    # Large initial weights, so that the losses of the tokens differ.
    module = Module(tiny_gpt.GptConfig(block_size=BLOCK, init_method_std=0.3), megatron_adam(3e-3))
    module.loss = loss
    return module


def make_data(layout: Any) -> Data:
    return Data(BLOCK, layout.micro_batch_size, layout.global_batch_size)


def exact_loss(model: Any, num_blocks: int = NUM_BLOCKS) -> float:
    """Returns the mean loss of all real tokens in float64, from a loop over single blocks."""
    blocks = MaskedBlocks(NUM_BLOCKS, BLOCK, first=500)
    losses = []
    with torch.no_grad():
        for index in range(num_blocks):
            tokens, labels, mask = (
                blocks[index][name][None] for name in ("tokens", "labels", "loss_mask")
            )
            losses.append(model(tokens, labels)[mask > 0])
    return float(torch.cat(losses).double().mean())


def exact_logits(model: Any) -> np.ndarray:
    """Returns the logits of all blocks, (N, S, V)."""
    blocks = MaskedBlocks(NUM_BLOCKS, BLOCK, first=500)
    with torch.no_grad():
        return torch.cat([model(blocks[k]["tokens"][None]) for k in range(NUM_BLOCKS)]).numpy()
