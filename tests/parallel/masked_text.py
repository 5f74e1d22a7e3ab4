"""The model of examples/gpt on blocks that are partly padding, for test_exact_validation.py.

33 blocks fill no global batch of 6, and only some of their tokens are real.
"""

import math
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch.utils.data import Dataset

from examples.gpt.gpt_components import GptConfig, GptModule
from megakit.data import MegatronDataModule
from megakit.training import LightningPassthroughPredictionMixin, megatron_adam

BLOCK, NUM_BLOCKS = 16, 33


class MaskedBlocks(Dataset[Any]):
    """Blocks of counting numbers with noise: block k is a function of k.

    Block k has from 1 to 16 real tokens, and the last block one; no block has a `label`.
    """

    def __len__(self) -> int:
        return NUM_BLOCKS

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(500 + index)
        start, noise = torch.randint(32, (2, BLOCK + 1), generator=generator)
        numbers = (start[0] + torch.arange(BLOCK + 1) * 3 + (noise % 7 == 0)) % 32
        num_real = 1 if index == NUM_BLOCKS - 1 else 1 + index * index % BLOCK
        mask = (torch.arange(BLOCK) < num_real).float()
        return {"tokens": numbers[:-1], "labels": numbers[1:], "loss_mask": mask, "idx": int(index)}


VALIDATED = MaskedBlocks()


class Data(MegatronDataModule):
    def setup(self, stage: str) -> None:
        self.val_set = self.test_set = VALIDATED


class Module(GptModule, LightningPassthroughPredictionMixin):
    """Predicts the loss of each token."""

    def predict_step(self, batch: Any, batch_idx: int | None = None) -> Any:
        output, kept = self(batch), {name: batch[name] for name in ("idx", "loss_mask")}
        return {"output": output, **kept} if parallel_state.is_pipeline_last_stage() else output


def make_module() -> GptModule:
    """The module; large initial weights make the losses of the tokens differ."""
    sizes: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
    return Module(GptConfig(**sizes, block_size=BLOCK, init_method_std=0.3), megatron_adam(3e-3))


def make_data(layout: Any) -> Data:
    data = Data(layout.micro_batch_size, layout.global_batch_size)
    data.data_sampler.seq_len = BLOCK  # of what the pipeline stages send
    return data


def exact_losses(model: Any) -> np.ndarray:
    """Returns the loss of each validated token, (N, S), from a loop over single blocks.

    A loss of padding is NaN.
    """
    rows = []
    with torch.no_grad():
        for index in range(NUM_BLOCKS):
            block = {name: value[None] for name, value in VALIDATED[index].items() if name != "idx"}
            losses = model(block["tokens"], labels=block["labels"]).double()
            rows.append(losses.masked_fill(block["loss_mask"] == 0, math.nan))
    return torch.cat(rows).numpy()
