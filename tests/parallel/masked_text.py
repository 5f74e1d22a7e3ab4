"""A tiny language model on blocks of tokens that are partly padding, for test_exact_validation.py.

33 blocks fill no global batch of 6, and only some of their tokens are real.
"""

import math
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from nemo.lightning import io
from nemo.lightning.megatron_parallel import MegatronLossReduction
from torch import Tensor
from torch.utils.data import Dataset

from megakit.data import IdentityMultiEpochDatasetWrapper, MegatronDataModule
from megakit.models import (
    IOMixinWithGettersSetters,
    MegatronBioNeMoTrainableModelConfig,
    SeededGPTModel,
    transformer_block_spec,
)
from megakit.training import (
    LightningPassthroughPredictionMixin,
    TokenMeanLossReduction,
    megatron_adam,
)

VOCABULARY, BLOCK = 32, 16
NUM_TRAINING, NUM_BLOCKS = 96, 33


class MaskedBlocks(Dataset[Any]):
    """Blocks of counting numbers with noise: block k is a function of k.

    Block k has from 1 to 16 real tokens, and the last block one; no block has a `label`.
    """

    def __init__(self, number: int, length: int, first: int = 0) -> None:
        self.number, self.length, self.first = number, length, first

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.first + index)
        start, noise = torch.randint(VOCABULARY, (2, self.length + 1), generator=generator)
        numbers = (start[0] + torch.arange(self.length + 1) * 3 + (noise % 7 == 0)) % VOCABULARY
        num_real = 1 if index == self.number - 1 else 1 + index * index % self.length
        mask = (torch.arange(self.length) < num_real).float()
        return {"tokens": numbers[:-1], "labels": numbers[1:], "loss_mask": mask, "idx": int(index)}


class Data(MegatronDataModule):
    def setup(self, stage: str) -> None:
        train = MaskedBlocks(NUM_TRAINING, BLOCK)
        self.train_set = self.resample(IdentityMultiEpochDatasetWrapper(train))
        self.val_set = self.test_set = MaskedBlocks(NUM_BLOCKS, BLOCK, first=500)


class NextTokenLoss(TokenMeanLossReduction):
    def token_losses(self, batch: Any, forward_out: Any) -> Tensor:
        losses: Tensor = forward_out
        return losses


class BitsLoss(NextTokenLoss):
    """A loss with a further value."""

    def token_values(self, batch: Any, forward_out: Any) -> dict[str, Tensor]:
        losses: Tensor = forward_out
        return {"bits": losses / math.log(2)}


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


LOSSES: dict[str, Any] = {"token mean": NextTokenLoss, "values": BitsLoss, "own": OwnLoss}


class LanguageModel(SeededGPTModel):
    def __init__(self, config: "GptConfig") -> None:
        super().__init__(
            config,
            transformer_block_spec(config, AttnMaskType.causal),
            vocab_size=VOCABULARY,
            max_sequence_length=BLOCK,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=True,
        )

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        gathers = labels is None  # Megatron's loss needs each rank's part of the logits
        return super().forward(
            tokens, positions, None, labels=labels, runtime_gather_output=gathers
        )


@dataclass
class GptConfig(
    MegatronBioNeMoTrainableModelConfig[LanguageModel, NextTokenLoss], IOMixinWithGettersSetters
):
    model_cls: type[LanguageModel] = LanguageModel
    loss_cls: type[NextTokenLoss] = NextTokenLoss
    num_layers: int = 4
    hidden_size: int = 32
    num_attention_heads: int = 4
    calculate_per_token_loss: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    init_method_std: float = 0.3  # large initial weights, so that the losses of the tokens differ


class Module(pl.LightningModule, io.IOMixin, LightningPassthroughPredictionMixin):
    """Predicts the logits of each token."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.config, self.optim, self.loss = GptConfig(), megatron_adam(3e-3), loss
        self.optim.connect(self)

    def configure_model(self) -> None:
        if not hasattr(self, "module"):
            self.module = self.config.configure_model()

    def forward(self, batch: Any, batch_idx: int | None = None) -> Any:
        return self.module(batch["tokens"], batch["labels"])

    forward_step = training_step = validation_step = forward

    def predict_step(self, batch: Any, batch_idx: int | None = None) -> Any:
        logits = self.module(batch["tokens"])
        return {"output": logits, "idx": batch["idx"], "loss_mask": batch["loss_mask"]}

    def training_loss_reduction(self) -> Any:
        return LOSSES[self.loss]()

    validation_loss_reduction = training_loss_reduction


def make_module(loss: str = "values") -> Module:
    return Module(loss)


def make_data(layout: Any) -> Data:
    data = Data(layout.micro_batch_size, layout.global_batch_size)
    data.data_sampler.seq_len = BLOCK  # of what the pipeline stages send
    return data


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
