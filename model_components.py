"""Defines the parts of the MNIST tutorial: losses, data, models, configs, Lightning module.

Three scripts use these parts. `model_pretrain.py` pretrains an autoencoder. `model_finetune.py`
turns the autoencoder's encoder, the trunk, into a digit classifier. `model_predict.py` classifies
the test images. To train a model of your own, copy this file and change it. The comment above each
part says what NeMo or Megatron requires of this part, and why. Names that contain BioNeMo or
Example come from NVIDIA BioNeMo's MNIST tutorial; the package BioNeMo is not needed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import lightning.pytorch as pl
import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.enums import ModelType
from nemo.lightning import io
from nemo.lightning.megatron_parallel import MegatronLossReduction
from nemo.lightning.pytorch.optim import MegatronOptimizerModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from megakit.data import (
    BatchedMultiEpochDatasetWrapper,
    EpochIndex,
    IdentityMultiEpochDatasetWrapper,
    MegatronDataModule,
    balanced_subset,
    bernoulli,
)
from megakit.models import (
    IOMixinWithGettersSetters,
    MegatronBioNeMoTrainableModelConfig,
    MegatronLossType,
    column_parallel_linear,
    returns_latent,
    row_parallel_linear,
    seeded,
)
from megakit.training import (
    LightningPassthroughPredictionMixin,
    MeanLossReduction,
    SameSizeLossDict,
    ValidationMetric,
    megatron_adam,
)
from megakit.training import MetricTracker as MetricTracker  # for the published tutorial
from mnist.dataset import MnistBatch as MnistBatch
from mnist.dataset import MNISTCustom as MNISTCustom
from mnist.dataset import MnistItem as MnistItem
from mnist.files import DatasetName, read_splits
from mnist.sizes import SizeOptions

# ----------------------------------------------------------------------------------------------
# Losses
#
# Megatron's pipeline schedule splits each training step into micro batches. It calls the loss's
# `forward` for each micro batch, on the last pipeline stage; `forward` returns a loss and a report.
# Megatron backpropagates the loss. NeMo passes the reports of all micro batches to `reduce`, which
# computes the value to log: `MeanLossReduction` takes the mean over micro batches and data-parallel
# ranks. Its method `report` builds the loss and the report. `report` accepts further values of each
# sample by name; each name gets a column in metrics.csv and a curve in TensorBoard.
# ----------------------------------------------------------------------------------------------


class MSELossReduction(MeanLossReduction):
    """Mean squared error between images and their reconstructions."""

    def forward(
        self, batch: MnistBatch, forward_out: "ExampleModelOutput"
    ) -> tuple[Tensor, SameSizeLossDict]:
        """Returns the loss of one micro batch and the report for the log."""
        x, x_hat = batch["data"].flatten(1).float(), forward_out["x_hat"]
        return self.report(nn.functional.mse_loss, x_hat, x, batch)


class ClassifierLossReduction(MeanLossReduction):
    """Cross entropy between labels and logits."""

    def forward(self, batch: MnistBatch, forward_out: Tensor) -> tuple[Tensor, SameSizeLossDict]:
        """Returns the loss of one micro batch and the report for the log."""
        return self.report(nn.functional.cross_entropy, forward_out, batch["label"], batch)


# ----------------------------------------------------------------------------------------------
# Data
#
# Every rank of one model replica loads the samples itself, and Megatron assumes that these ranks
# get equal samples. A sample must therefore depend on its index alone. The dataset here is
# `MNISTCustom` in `mnist/dataset.py`. Megatron reads samples in the order of their indices, 0, 1,
# 2, ..., so that a resumed run can skip the consumed samples. Shuffling, epochs and random effects
# are therefore computed from the index, by wrappers around the dataset.
# ----------------------------------------------------------------------------------------------


@dataclass
class DropPixels(BatchedMultiEpochDatasetWrapper[MnistItem, MnistItem]):
    """Sets random pixels of each image to 0, for the autoencoder to reconstruct.

    This is the pattern for all random effects: the random numbers depend on seed, epoch and sample
    index only. All ranks of a model replica then get equal samples, and a resumed run gets the
    samples of a run without a stop. The pixels differ between epochs.
    """

    share: float = 0.0
    seed: int = 42

    def apply_transform_batch(self, batch: Any, index: EpochIndex) -> Any:
        shape = tuple(batch["data"].shape[1:])
        kept = bernoulli(1 - self.share, self.seed, index.epoch, index.idx, shape)
        # Multiplication by uint8 is faster than by bool.
        return {**batch, "corrupted": batch["data"] * torch.from_numpy(kept).byte()}


class MNISTDataModule(MegatronDataModule):
    """Loads the data: of MNIST 55,000 training, 5,000 validation and 10,000 test images.

    Args:
        data_dir: Folder that contains `MNIST/raw`.
        batch_size: Micro batch size: samples per rank and forward pass.
        output_log: Whether NeMo's sampler logs its own metrics.
        dataset: `mnist`, or `digits` from scikit-learn.
        corruption: Share of the pixels of each training image to set to 0.
        num_labels: Number of labelled images to train on, balanced over the classes; default: all.
        options: Options of `MegatronDataModule`: `global_batch_size`, `seed`, `num_workers`.
    """

    def __init__(
        self,
        data_dir: str | Path = "./",
        batch_size: int = 32,
        output_log: bool = False,
        *,
        dataset: DatasetName = "mnist",
        corruption: float = 0.0,
        num_labels: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, output_log=output_log, **options)
        self.data_dir, self.dataset = Path(data_dir), dataset
        self.corruption, self.num_labels = corruption, num_labels

    def setup(self, stage: str) -> None:
        """Reads the images. Lightning calls this on every rank; `stage` is fit, validate, ..."""
        train, self.val_set, self.test_set = read_splits(
            self.data_dir, self.dataset, MNISTCustom.from_arrays
        )
        if self.num_labels is not None:
            train = balanced_subset(train, self.num_labels, self.seed)
        self.train_set = self.resample(self.with_random_effects(train))

    def with_random_effects(self, train: Any) -> Any:
        """Wraps the training images in a dataset that is indexed by (epoch, index)."""
        if self.corruption:
            return DropPixels(train, self.corruption, self.seed)
        return IdentityMultiEpochDatasetWrapper(train)  # the same images in every epoch

    # Names of the published tutorial.
    mnist_train = property(lambda self: self.train_set)
    mnist_val = property(lambda self: self.val_set)
    mnist_test = property(lambda self: self.test_set)


# ----------------------------------------------------------------------------------------------
# Models
#
# Megatron requires three attributes of a model: a config of type ModelParallelConfig, `model_type`,
# and `set_input_tensor`. The pipeline schedule calls `set_input_tensor` on each stage but the first
# and passes the output of the previous stage.
#
# Tensor parallelism shards two consecutive linear layers along the 64 features between them. The
# first layer is sharded by its outputs (column parallel), the second by its inputs (row parallel).
# Each rank computes its shard of the 64 features without communication. One all-reduce after the
# second layer sums the results of the ranks. ReLU can stay between the two layers, because ReLU
# acts on each feature separately.
#
# Pipeline parallelism splits each model after the encoder: the first stage has linear1 and linear2,
# the second stage has the decoder or the head. The first stage sends z to the second.
# ----------------------------------------------------------------------------------------------


class ExampleModelOutput(TypedDict):
    """The autoencoder's output: reconstructions x_hat (B, 784) and latent vectors z (B, 3)."""

    x_hat: Tensor
    z: Tensor


class ExampleModelTrunk(MegatronModule):
    """The encoder of both models; at the default sizes its layers have 784, 64 and 3 features."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        # Whether this rank's stage is the first, or the last. With one stage, both are true.
        self.pre_process = parallel_state.is_pipeline_first_stage()
        self.post_process = parallel_state.is_pipeline_last_stage()
        # Megatron reads this attribute of every model: no weights are shared between stages.
        self.share_embeddings_and_output_weights = False
        self.input_tensor: Tensor | None = None
        if self.pre_process:
            self.linear1 = column_parallel_linear(config, 28 * 28, config.hidden_size, "linear1")
            self.relu = nn.ReLU()
            self.linear2 = row_parallel_linear(
                config, config.hidden_size, config.latent_size, "linear2"
            )

    def forward(self, x: Tensor) -> Any:
        """Encodes images (B, 1, 28, 28) as z (B, 3); the second stage returns the received z."""
        if self.pre_process:
            # Megatron's layers return (output, bias). These layers add the bias and return None.
            z, _ = self.linear1(x.flatten(1))
            z, _ = self.linear2(self.relu(z))
        else:
            assert self.input_tensor is not None, "the pipeline's schedule sets it"
            z = self.input_tensor.squeeze(0)
        return z

    def to_next_stage(self, z: Tensor) -> Tensor:
        """Reshapes z to (sequence, batch, hidden), the shape that pipeline stages exchange."""
        return z.unsqueeze(0)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor


class PretrainModel(ExampleModelTrunk):
    """The autoencoder: the trunk and a decoder with 3, 64 and 784 features."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__(config)
        if self.post_process:
            self.linear3 = column_parallel_linear(
                config, config.latent_size, config.hidden_size, "linear3"
            )
            self.relu2 = nn.ReLU()
            self.linear4 = row_parallel_linear(config, config.hidden_size, 28 * 28, "linear4")

    def forward(self, x: Tensor) -> ExampleModelOutput | Tensor:
        """Encodes and reconstructs images (B, 1, 28, 28)."""
        z: Tensor = super().forward(x)
        if not self.post_process:
            return self.to_next_stage(z)
        x_hat, _ = self.linear3(z)
        x_hat, _ = self.linear4(self.relu2(x_hat))
        return {"x_hat": x_hat, "z": z}


class ExampleFineTuneModel(ExampleModelTrunk):
    """The classifier: the trunk and a linear head with 3 inputs and 10 outputs."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__(config)
        if self.post_process:
            # The head has only 30 weights: replicated on all tensor-parallel ranks, not sharded.
            with seeded(config.seed, "digit_classifier"):
                self.digit_classifier = nn.Linear(config.latent_size, 10)

    def forward(self, x: Tensor, return_latent: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Returns logits (B, 10) of images (B, 1, 28, 28), and on request the latent z (B, 3)."""
        z: Tensor = super().forward(x)
        if not self.post_process:
            return self.to_next_stage(z)
        logits: Tensor = self.digit_classifier(z)
        return (logits, z) if return_latent else logits


# ----------------------------------------------------------------------------------------------
# Configs
#
# Each rank allocates only its shard of the model. The model can therefore be built only after NeMo
# has set up the process groups. So the Lightning module gets a config instead of a model, and NeMo
# calls `configure_model` when the process groups exist. The config also names the model's loss
# class and the checkpoint of the initial weights. NeMo writes the config into each checkpoint, and
# the next script reads the sizes of the trunk from there. If the next script must not read a field
# from the checkpoint, add the field's name to `override_parent_fields`.
# ----------------------------------------------------------------------------------------------

ExampleModelT = TypeVar("ExampleModelT", bound=ExampleModelTrunk)


@dataclass
class ExampleGenericConfig(
    MegatronBioNeMoTrainableModelConfig[ExampleModelT, MegatronLossType], IOMixinWithGettersSetters
):
    """Sizes of both models; each subclass names its model class and its loss class."""

    loss_cls: type[MegatronLossType] = MSELossReduction
    hidden_size: int = SizeOptions.hidden_size  # of linear1, linear3; sharded by tensor parallelism
    latent_size: int = SizeOptions.latent_size  # of z


@dataclass
class PretrainConfig(ExampleGenericConfig[PretrainModel, MSELossReduction]):
    """Configures the autoencoder and its reconstruction loss."""

    model_cls: type[PretrainModel] = PretrainModel
    loss_cls: type[MSELossReduction] = MSELossReduction


@dataclass
class ExampleFineTuneConfig(ExampleGenericConfig[ExampleFineTuneModel, ClassifierLossReduction]):
    """Configures the classifier and its cross-entropy loss."""

    model_cls: type[ExampleFineTuneModel] = ExampleFineTuneModel
    loss_cls: type[ClassifierLossReduction] = ClassifierLossReduction

    def validation_metrics(self) -> dict[str, ValidationMetric]:
        """Names the metrics of a validation; `accuracy` is logged as `val_accuracy`."""
        return {"accuracy": accuracy_of_classes()}


def accuracy_of_classes() -> ValidationMetric:
    """Returns the metric: share of images whose largest logit (B, classes) is at the label."""
    return ValidationMetric(
        MulticlassAccuracy(average="micro"), lambda batch, logits: (logits, batch["label"])
    )


# ----------------------------------------------------------------------------------------------
# Lightning module
#
# NeMo's strategy replaces Lightning's training step. The calls are: strategy -> MegatronParallel ->
# Megatron's schedule -> `training_step` below, once for each micro batch. `training_step` returns
# the model's output, not the loss: Megatron's schedule computes the loss with the object that
# `training_loss_reduction` returns. This module works with any pair of model and loss, because the
# config names them.
# ----------------------------------------------------------------------------------------------


class BionemoLightningModule(pl.LightningModule, io.IOMixin, LightningPassthroughPredictionMixin):
    """Trains, validates and predicts with the model that the config builds.

    Args:
        config: Builds the model and names the loss class.
        optimizer: By default Megatron's Adam with a constant learning rate of 1e-4.
    """

    def __init__(
        self,
        config: MegatronBioNeMoTrainableModelConfig,
        optimizer: MegatronOptimizerModule | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.optim = optimizer or megatron_adam(lr=1e-4)
        self.optim.connect(self)  # adds `configure_optimizers` to this module

    def configure_model(self) -> None:
        # NeMo may call this again when a run resumes. The first model is kept.
        if not hasattr(self, "module"):
            self.module = self.config.configure_model()

    def forward(self, batch: MnistBatch, batch_idx: int | None = None, **options: Any) -> Any:
        """Returns the model's output for one micro batch."""
        return self.module(batch.get("corrupted", batch["data"]), **options)

    def training_step(self, batch: MnistBatch, batch_idx: int | None = None) -> Any:
        return self(batch, batch_idx)

    # NeMo calls `forward_step` on all pipeline stages but the last. On the last stage, NeMo calls
    # `training_step` in training and `validation_step` in validation.
    forward_step = training_step
    validation_step = training_step

    def predict_step(self, batch: MnistBatch, batch_idx: int | None = None) -> Any:
        """Returns the model's output with each sample's idx, label and loss mask.

        Pipeline stages other than the last return their output for the next stage.
        """
        has_latent = returns_latent(self.config.model_cls)
        output = self(batch, return_latent=True) if has_latent else self(batch)
        if not parallel_state.is_pipeline_last_stage():
            return output
        outputs = {key: batch[key] for key in ("idx", "label", "loss_mask")}
        if has_latent:
            output, outputs["latent"] = output
        return {"output": output, **outputs}

    def training_loss_reduction(self) -> MegatronLossReduction:
        return self.loss_reduction_class()()

    validation_loss_reduction = test_loss_reduction = training_loss_reduction

    def loss_reduction_class(self) -> type[MegatronLossReduction]:
        """Returns the loss class that the config names."""
        return self.config.get_loss_reduction_class()

    def validation_metrics(self) -> dict[str, ValidationMetric]:
        """Returns the config's metrics; `megakit` computes them in each validation."""
        return self.config.validation_metrics()
