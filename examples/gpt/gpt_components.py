"""Defines the parts of a language model, in the order of the tutorial's `model_components.py`.

A token is a byte, so the vocabulary has 256 tokens and needs no tokenizer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before all other imports of Megatron; its docstring gives the reason.
import megakit.runtime.import_megatron  # isort: skip  # noqa: F401
import lightning.pytorch as pl
import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.enums import AttnMaskType
from nemo import lightning as nl
from nemo.lightning import io
from nemo.lightning.pytorch.optim import MegatronOptimizerModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from examples.gpt.gpt_sizes import VOCABULARY, SizeOptions
from examples.gpt.text_files import read_splits
from megakit.data import IdentityMultiEpochDatasetWrapper, MegatronDataModule
from megakit.job import Run
from megakit.models import (
    IOMixinWithGettersSetters,
    MegatronBioNeMoTrainableModelConfig,
    SeededGPTModel,
    transformer_block_spec,
)
from megakit.training import ExactStrategy, TokenMeanLossReduction, megatron_adam

# --- Loss -----------------------------------------------------------------------------------------
# The last block of a text has fewer tokens than the others, so micro batches may have unequal
# numbers of tokens. A mean of the micro batches' means would weigh tokens unequally.
# `TokenMeanLossReduction` returns sums and counts instead.


class NextTokenLoss(TokenMeanLossReduction):
    """Averages the cross entropy of the next token over all tokens of a global batch."""

    def token_losses(self, batch: Any, forward_out: Tensor) -> Tensor:
        return forward_out  # the cross entropies (B, S), which Megatron's model has computed

    def token_values(self, batch: Any, forward_out: Tensor) -> dict[str, Tensor]:
        return {"bits_per_byte": forward_out / math.log(2)}  # for the log


# --- Data -----------------------------------------------------------------------------------------


class TextBlocks(Dataset[dict[str, Any]]):
    """Cuts a text into blocks of S tokens; the sample with index k depends on k only.

    A sample has `tokens` and `labels`, int64 (S,): the labels are the tokens that follow. The last
    block is padded; its `loss_mask`, float32 (S,), is 0 for padding.
    """

    def __init__(self, text: bytes, block_size: int) -> None:
        self.text, self.block_size = text, block_size

    def __len__(self) -> int:
        return -(-(len(self.text) - 1) // self.block_size)  # the last byte is only a label

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]  # raises IndexError, and accepts negative indices
        batch = self.get_batch(np.array([index]))
        return {name: values[0] for name, values in batch.items()} | {"idx": int(batch["idx"])}

    def get_batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """Returns several samples at once; `idx` is int64 (B,)."""
        size = self.block_size
        blocks = np.zeros((len(indices), size + 1), np.int64)
        mask = np.ones((len(indices), size), np.float32)
        for row, index in enumerate(indices.tolist()):
            content = self.text[index * size : (index + 1) * size + 1]
            blocks[row, : len(content)] = np.frombuffer(content, np.uint8)
            mask[row, len(content) - 1 :] = 0
        tokens = torch.from_numpy(blocks)
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.from_numpy(mask),
            "idx": torch.from_numpy(indices.astype(np.int64)),
        }


class TextDataModule(MegatronDataModule):
    """Loads blocks of a text; the other arguments are those of `MegatronDataModule`."""

    def __init__(self, text: Path | None, block_size: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.text, self.block_size = text, block_size
        self.data_sampler.seq_len = block_size  # of what the pipeline stages send

    def setup(self, stage: str) -> None:
        """Reads the text on every rank. Each epoch has another random order of training blocks."""
        train, val = (TextBlocks(text, self.block_size) for text in read_splits(self.text))
        self.train_set = self.resample(IdentityMultiEpochDatasetWrapper(train))
        self.val_set = self.test_set = val


# --- Model ----------------------------------------------------------------------------------------
# Megatron's GPTModel implements tensor and pipeline parallelism itself. The rows of the embedding
# (the vocabulary), the heads and the widths are sharded over the tensor-parallel ranks. The layers
# are distributed to the pipeline stages. The first stage has the embedding, the last stage the
# output layer. With tied weights, both stages have a copy, and Megatron sums the gradients.


class LanguageModel(SeededGPTModel):
    """Predicts the next token of each position, from all tokens up to this position."""

    def __init__(self, config: "GptConfig") -> None:
        super().__init__(
            config,
            transformer_block_spec(config, AttnMaskType.causal),
            vocab_size=VOCABULARY,
            max_sequence_length=config.block_size,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=config.tied_weights,
            position_embedding_type="learned_absolute",
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: None = None,
        **options: Any,
    ) -> Tensor:
        """Returns logits (B, S, 256) of tokens, int64 (B, S); by default at positions 0, 1, 2, ...

        With `labels`, int64 (B, S), returns the cross entropy of each label, float32 (B, S). Before
        the last pipeline stage, returns the hidden states (S, B, H). Megatron's model has further
        options. There is no attention mask, because the layers attend to earlier tokens only.
        """
        if position_ids is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            position_ids = positions.expand_as(input_ids)
        options = {"runtime_gather_output": "labels" not in options} | options
        output: Tensor = super().forward(input_ids, position_ids, attention_mask, **options)
        return output


# --- Config ---------------------------------------------------------------------------------------


@dataclass
class GptConfig(
    MegatronBioNeMoTrainableModelConfig[LanguageModel, NextTokenLoss], IOMixinWithGettersSetters
):
    """Holds the sizes of the model. Its other fields are those of Megatron's TransformerConfig."""

    model_cls: type[LanguageModel] = LanguageModel
    loss_cls: type[NextTokenLoss] = NextTokenLoss
    num_layers: int = SizeOptions.num_layers
    hidden_size: int = SizeOptions.hidden_size
    num_attention_heads: int = SizeOptions.num_attention_heads
    block_size: int = SizeOptions.block_size
    tied_weights: bool = True  # the output layer uses the weights of the embedding
    calculate_per_token_loss: bool = True  # TokenMeanLossReduction requires this
    init_method_std: float = 0.06  # for a width of 128; Megatron's 0.02 suits one of thousands
    hidden_dropout: float = 0.0  # Megatron's defaults are 0.1
    attention_dropout: float = 0.0


# --- Lightning module -----------------------------------------------------------------------------


class GptModule(pl.LightningModule, io.IOMixin):
    """Trains and validates the model that the config builds."""

    def __init__(self, config: GptConfig, optimizer: MegatronOptimizerModule | None = None) -> None:
        super().__init__()
        self.config = config
        self.optim = optimizer or megatron_adam(lr=1e-3)
        self.optim.connect(self)  # adds `configure_optimizers` to this module

    def configure_model(self) -> None:
        # NeMo may call this method again when a run resumes. The first model is kept.
        if not hasattr(self, "module"):
            self.module = self.config.configure_model()

    def forward(self, batch: Any, batch_idx: int | None = None) -> Tensor:
        losses: Tensor = self.module(batch["tokens"], labels=batch["labels"])
        return losses  # of each token, float32 (B, S)

    def training_step(self, batch: Any, batch_idx: int | None = None) -> Tensor:
        return self(batch, batch_idx)

    # The last pipeline stage calls `training_step` and `validation_step`, others `forward_step`.
    forward_step = validation_step = training_step

    def training_loss_reduction(self) -> NextTokenLoss:
        return self.config.get_loss_reduction_class()()

    validation_loss_reduction = test_loss_reduction = training_loss_reduction


# --- Trainer --------------------------------------------------------------------------------------


def build_trainer(
    run: Run,
    callbacks: Sequence[pl.Callback] = (),
    *,
    sequence_parallel: bool = False,
    distributed_optimizer: bool = False,
) -> nl.Trainer:
    """Returns the trainer of a run; the tutorial's `build_trainer` explains its arguments."""
    strategy = ExactStrategy(
        tensor_model_parallel_size=run.layout.tensor,
        pipeline_model_parallel_size=run.layout.pipeline,
        parallel_devices=run.devices,
        sequence_parallel=sequence_parallel,
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer),
        setup_optimizers=run.trains,
        timeout=run.timeout,
    )
    return nl.Trainer(
        accelerator=run.accelerator.name,
        devices="auto",
        num_nodes=run.layout.num_nodes,
        strategy=strategy,
        plugins=nl.MegatronMixedPrecision(precision=run.precision),
        max_steps=run.max_steps,
        val_check_interval=run.val_interval,
        check_val_every_n_epoch=None,
        limit_val_batches=run.limit_val_batches,
        num_sanity_val_steps=0,
        logger=run.logger(),
        log_every_n_steps=10,
        callbacks=[*callbacks, *run.callbacks()],
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
