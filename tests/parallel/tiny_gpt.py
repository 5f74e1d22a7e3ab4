"""A tiny language model on Megatron's GPTModel. Ranks import it once Megatron is set up."""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from nemo.lightning import io
from torch import Tensor
from torch.utils.data import Dataset

from megakit.data import IdentityMultiEpochDatasetWrapper, MegatronDataModule
from megakit.errors import Stopped
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

VOCABULARY = 32
NUM_TRAINING, NUM_VALIDATION = 96, 10


class Blocks(Dataset[Any]):
    """Blocks of counting numbers with noise: block k is a function of k."""

    def __init__(self, number: int, length: int, first: int = 0) -> None:
        self.number, self.length, self.first = number, length, first

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.first + index)
        start, noise = torch.randint(VOCABULARY, (2, self.length + 1), generator=generator)
        numbers = (start[0] + torch.arange(self.length + 1) * 3 + (noise % 7 == 0)) % VOCABULARY
        return {"tokens": numbers[:-1], "labels": numbers[1:], "label": 0, "idx": int(index)}


class Data(MegatronDataModule):
    def __init__(self, block_size: int, micro: int, batch: int) -> None:
        super().__init__(micro, batch)
        self.block_size = block_size

    def setup(self, stage: str) -> None:
        train = Blocks(NUM_TRAINING, self.block_size)
        self.train_set = self.resample(IdentityMultiEpochDatasetWrapper(train))
        self.val_set = Blocks(NUM_VALIDATION, self.block_size, first=10_000)
        self.test_set = self.val_set


class NextTokenLoss(TokenMeanLossReduction):
    def token_losses(self, batch: Any, forward_out: Any) -> Tensor:
        losses: Tensor = forward_out
        return losses


class LanguageModel(SeededGPTModel):
    def __init__(self, config: "GptConfig") -> None:
        super().__init__(
            config,
            transformer_block_spec(config, AttnMaskType.causal),
            vocab_size=VOCABULARY,
            max_sequence_length=config.block_size,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=config.tied_weights,
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
    block_size: int = 16
    num_layers: int = 4
    hidden_size: int = 32
    num_attention_heads: int = 4
    calculate_per_token_loss: bool = True
    tied_weights: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0


class GptModule(pl.LightningModule, io.IOMixin, LightningPassthroughPredictionMixin):
    def __init__(self, config: GptConfig, optimizer: Any = None) -> None:
        super().__init__()
        self.config, self.optim = config, optimizer or megatron_adam(1e-3)
        self.optim.connect(self)

    def configure_model(self) -> None:
        if not hasattr(self, "module"):
            self.module = self.config.configure_model()

    def forward(self, batch: Any, batch_idx: int | None = None) -> Any:
        return self.module(batch["tokens"], batch["labels"])

    forward_step = training_step = validation_step = forward

    def predict_step(self, batch: Any, batch_idx: int | None = None) -> Any:
        output = self.module(batch["tokens"])
        if not parallel_state.is_pipeline_last_stage():
            return output
        kept = ("idx", "label", "loss_mask")
        return {"output": output, **{name: batch[name] for name in kept if name in batch}}

    def training_loss_reduction(self) -> NextTokenLoss:
        return NextTokenLoss()

    validation_loss_reduction = test_loss_reduction = training_loss_reduction


class Watch(pl.Callback):
    """Collects the losses of the last stage; saves and stops before a step."""

    def __init__(self, stop_before: int | None) -> None:
        self.stop_before = stop_before
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.stop_before:
            trainer.checkpoint_callback.save(trainer, store_values=False)
            raise Stopped(15, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        if parallel_state.is_pipeline_last_stage():
            self.losses.append(float(outputs["loss"]))

    def __deepcopy__(self, memo: object) -> "Watch":
        return self  # NeMo copies callbacks in order to record them
