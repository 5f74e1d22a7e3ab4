"""Defines the parts of both trainings: data, models, losses, and what Megatron wraps around them.

`model_pretrain.py` pretrains an autoencoder. `model_finetune.py` turns its encoder, the trunk, into
a digit classifier. `model_predict.py` classifies the test images. The comment above each part says
what Megatron-Core requires of this part, and why. To train a model of your own, change this file.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megakit.data import (
    BatchedMultiEpochDatasetWrapper,
    EpochIndex,
    GlobalBatchSampler,
    IdentityMultiEpochDatasetWrapper,
    MultiEpochDatasetResampler,
    bernoulli_like,
)
from megakit.data.loader import make_loader
from megakit.job import Run
from megakit.models import column_parallel_linear, row_parallel_linear, seeded
from megakit.training import weighted_mean
from mnist.dataset import MnistBatch, MnistItem

# --- Data -----------------------------------------------------------------------------------------
# All ranks of a replica, one copy of the model, load the same samples, each rank on its own.
# Megatron does not check that the samples are equal. A sample must therefore depend only on its
# index. Step n trains on the samples n * batch to (n + 1) * batch of one long dataset, in every
# layout and after every resumption.


@dataclass
class DropPixels(BatchedMultiEpochDatasetWrapper[MnistItem, MnistItem]):
    """Sets random pixels of each image to 0, for the autoencoder to reconstruct.

    The random numbers depend only on the seed, the epoch and the sample's index. So all ranks of a
    replica, and a resumed run, get equal samples. Use this pattern for your own random effects.
    """

    share: float = 0.0
    seed: int = 42

    def apply_transform_batch(self, batch: Any, index: EpochIndex) -> Any:
        kept = bernoulli_like(batch["data"], 1 - self.share, self.seed, index)
        # Multiplication by uint8 is faster than multiplication by bool.
        return {**batch, "corrupted": batch["data"] * kept.view(torch.uint8)}


def all_epochs(images: Any, run: Run, corruption: float = 0.0) -> MultiEpochDatasetResampler:
    """Returns the training samples of all epochs, shuffled differently in each epoch."""
    seed = run.options.seed
    indexed_by_epoch: Any = IdentityMultiEpochDatasetWrapper(images)
    if corruption:
        indexed_by_epoch = DropPixels(images, corruption, seed)
    num_samples = run.options.max_steps * run.layout.global_batch_size
    return MultiEpochDatasetResampler(indexed_by_epoch, num_samples=num_samples, seed=seed)


def micro_batches(
    run: Run, dataset: Any, *, consumed: int = 0, pad: bool = False, limit: int | None = None
) -> DataLoader:
    """Returns a loader of this rank's micro batches, in the order of the samples' indices.

    Args:
        run: The run.
        dataset: The samples.
        consumed: The number of samples that earlier steps have read.
        pad: Whether to fill the last global batch, instead of dropping it. Each batch then has a
            `loss_mask`: 0 for padding, and one weight for all samples, so that the mean over all
            micro batches and ranks is the mean over the samples.
        limit: The largest number of global batches; None: all.
    """
    layout, num_samples = run.layout, len(dataset)
    if limit is not None:
        num_samples = min(num_samples, limit * layout.global_batch_size)
    sampler = GlobalBatchSampler(
        num_samples,
        layout.micro_batch_size,
        layout.global_batch_size,
        rank=parallel_state.get_data_parallel_rank(),
        num_ranks=layout.data,
        start=lambda: consumed,
        pad=pad,
    )
    loader = DataLoader(dataset, num_workers=run.options.num_workers)
    device = torch.device(torch.cuda.current_device())
    return make_loader(loader, sampler, sampler.padding_weight() if pad else None, device)


# --- Models ---------------------------------------------------------------------------------------
# Megatron requires three attributes of a model: a config of type TransformerConfig, even if the
# model is no transformer, `model_type`, and `set_input_tensor`; with several pipeline stages also
# `share_embeddings_and_output_weights`. Megatron's schedule runs the passes of all micro batches.
# On each stage but the first, it hands the output of the previous stage to `set_input_tensor`.
#
# Tensor parallelism shards two consecutive linear layers along the features between them: the first
# by its outputs (column parallel), the second by its inputs (row parallel). Pipeline parallelism
# splits each model after the encoder: the first stage sends the latent vectors z to the second.


@dataclass
class ModelConfig(TransformerConfig):
    """Megatron's config, with what these models need beside it."""

    seed: int = 42  # of the first weights, which are equal in every layout
    width: int = 64  # of the layers linear1 and linear3


def model_config(run: Run, hidden_size: int, latent_size: int) -> ModelConfig:
    """Returns the config of a model for this job's layout and precision."""
    layout, is_bf16 = run.layout, run.precision == "bf16-mixed"
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    return ModelConfig(
        seed=getattr(run.options, "seed", 0),
        width=hidden_size,
        hidden_size=latent_size,  # the width of what pipeline stages exchange
        num_layers=layout.pipeline,  # unused, but checked: a multiple of the stages
        num_attention_heads=layout.tensor,  # likewise, of the ranks that share a layer
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        bf16=is_bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,  # equal first weights on CPUs and GPUs
        finalize_model_grads_func=finalize_model_grads,  # averages over data-parallel ranks
    )


class Trunk(MegatronModule):
    """Encodes images as latent vectors z. Both models inherit it, with equal names of weights."""

    config: ModelConfig

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder  # Megatron's only type, for every model
        self.share_embeddings_and_output_weights = False
        # Whether this rank's stage is the first or the last. With one stage, both values are true.
        self.pre_process = parallel_state.is_pipeline_first_stage()
        self.post_process = parallel_state.is_pipeline_last_stage()
        self.input_tensor: Tensor | None = None
        if self.pre_process:
            self.linear1 = column_parallel_linear(config, 28 * 28, config.width, "linear1")
            self.linear2 = row_parallel_linear(config, config.width, config.hidden_size, "linear2")

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        self.input_tensor = input_tensor[0]

    def encode(self, x: Tensor) -> Tensor:
        """Encodes images (B, 1, 28, 28) as z (B, 3); on the second stage, returns z as received."""
        if not self.pre_process:
            assert self.input_tensor is not None, "Megatron's schedule sets input_tensor"
            return self.input_tensor.squeeze(0)
        hidden, _ = self.linear1(x.flatten(1))  # Megatron's layers return (output, bias)
        z: Tensor = self.linear2(hidden.relu())[0]
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Returns the model's output; on the first of two stages, what the second one needs."""
        z = self.encode(x)
        # Stages exchange (sequence, batch, hidden).
        return self.decode(z) if self.post_process else z.unsqueeze(0)

    def decode(self, z: Tensor) -> Tensor:
        raise NotImplementedError


class Autoencoder(Trunk):
    """Reconstructs images: the trunk, and a decoder with 3, 64 and 784 features."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if self.post_process:
            self.linear3 = column_parallel_linear(
                config, config.hidden_size, config.width, "linear3"
            )
            self.linear4 = row_parallel_linear(config, config.width, 28 * 28, "linear4")

    def decode(self, z: Tensor) -> Tensor:
        """Returns reconstructions (B, 784)."""
        hidden, _ = self.linear3(z)
        x_hat: Tensor = self.linear4(hidden.relu())[0]
        return x_hat


class Classifier(Trunk):
    """Classifies images: the trunk, and a linear head, which all tensor-parallel ranks have."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if self.post_process:
            with seeded(config.seed, "digit_classifier"):
                self.digit_classifier = nn.Linear(config.hidden_size, 10)

    def decode(self, z: Tensor) -> Tensor:
        """Returns logits (B, 10)."""
        logits: Tensor = self.digit_classifier(z)
        return logits


# --- Forward steps and losses ---------------------------------------------------------------------
# Megatron's schedule calls `forward_step` for each micro batch. It returns the model's output and a
# function, which the schedule calls with this output on the last pipeline stage. The function
# returns the loss, to backpropagate, and a report with the values to log: each is a column of
# metrics.csv and a curve in TensorBoard.

LossFunction = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]


def reconstruct(batches: Iterator[MnistBatch], model: nn.Module) -> tuple[Tensor, LossFunction]:
    """Runs the autoencoder on one micro batch."""
    batch = next(batches)
    x_hat = model(batch.get("corrupted", batch["data"]))
    return x_hat, partial(reconstruction_loss, batch)


def reconstruction_loss(batch: MnistBatch, x_hat: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the mean squared error between the images and their reconstructions (B, 784)."""
    losses = nn.functional.mse_loss(x_hat.float(), batch["data"].flatten(1), reduction="none")
    return with_report(batch, losses)


def classify(batches: Iterator[MnistBatch], model: nn.Module) -> tuple[Tensor, LossFunction]:
    """Runs the classifier on one micro batch."""
    batch = next(batches)
    return model(batch["data"]), partial(classification_loss, batch)


def classification_loss(batch: MnistBatch, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the cross entropy of logits (B, 10), and reports the accuracy, too."""
    losses = nn.functional.cross_entropy(logits.float(), batch["label"], reduction="none")
    return with_report(batch, losses, accuracy=logits.argmax(dim=1) == batch["label"])


def with_report(batch: Any, losses: Tensor, **values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the mean loss, and the means to log; padding of a validation does not count."""
    loss = weighted_mean(losses, batch)
    # In float64: equal accuracies must not differ by rounding, since --stop-after compares them.
    means = {name: weighted_mean(value.double(), batch) for name, value in values.items()}
    # Megatron divides the loss in place by the number of micro batches; the log gets a clone.
    return loss, {"loss": loss.detach().clone(), **means}


# --- What Megatron wraps around a model -----------------------------------------------------------
# `DistributedDataParallel` holds the gradients of all weights in one float32 buffer, which the
# data-parallel ranks average. Megatron's optimizer reads this buffer, clips the gradient to a norm
# of 1, and keeps float32 copies of bfloat16 weights. A distributed optimizer shards Adam's states
# over the data-parallel ranks; both configs have to ask for it.


class Parts(NamedTuple):
    """What a training changes, and a checkpoint contains."""

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def on_device(model: Trunk) -> MegatronModule:
    """Returns a model on this rank's device; for bfloat16, in a module that casts its inputs."""
    model = model.to(torch.cuda.current_device())
    return Float16Module(model.config, model) if model.config.bf16 else model


def wrap(
    model: Trunk,
    lr: float,
    max_steps: int,
    *,
    warmup_share: float = 0.1,
    beta1: float = 0.9,
    use_distributed_optimizer: bool = False,
) -> Parts:
    """Returns a model with its gradient buffers, Adam, and a learning rate like half a cosine.

    Args:
        model: This rank's part of the model, in float32.
        lr: Peak learning rate.
        max_steps: Optimizer steps; after the last one, the learning rate is 0.
        warmup_share: Share of the steps in which the learning rate grows to its peak.
        beta1: Decay rate of Adam's average of gradients, the momentum.
        use_distributed_optimizer: Whether data-parallel ranks share Adam's states.
    """
    config, weight_decay = model.config, 0.01
    adam = OptimizerConfig(
        lr=lr,
        min_lr=0.0,
        weight_decay=weight_decay,
        adam_beta1=beta1,
        adam_beta2=0.98,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=use_distributed_optimizer
    )
    wrapped = DistributedDataParallel(config, buffers, on_device(model))
    config.no_sync_func = wrapped.no_sync  # for `overlap_grad_reduce` with several micro batches
    optimizer = get_megatron_optimizer(adam, [wrapped])
    warmup_steps = max(1, round(warmup_share * max_steps))
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=lr / (warmup_steps + 1),
        max_lr=lr,
        min_lr=0.0,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(max_steps, warmup_steps + 1),  # Megatron refuses equal numbers
        lr_decay_style="cosine",
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=max_steps,
        wd_incr_style="constant",
    )
    return Parts(wrapped, optimizer, scheduler)
