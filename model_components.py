"""The parts of the MNIST tutorial, in teaching order: losses, data, models, configs, module.

Three scripts put them together: an autoencoder is pretrained (`model_pretrain.py`), its trunk
becomes a digit classifier (`model_finetune.py`), and the classifier reads the test images
(`model_predict.py`). For a model of your own, this is the file to copy and change; each banner says
what NeMo or Megatron demands of the part below it, and why. Names with BioNeMo or Example in them
are those of NVIDIA BioNeMo's MNIST tutorial; nothing of BioNeMo is needed.
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
from megakit.training import MetricTracker as MetricTracker  # published code takes it from here
from mnist.dataset import MnistBatch as MnistBatch
from mnist.dataset import MNISTCustom as MNISTCustom
from mnist.dataset import MnistItem as MnistItem
from mnist.files import DatasetName, read_splits
from mnist.sizes import SizeOptions

# ----------------------------------------------------------------------------------------------
# Losses
#
# Megatron's schedule runs a step as several micro batches, maybe on several ranks. It calls a loss
# object once for each micro batch, on the last pipeline stage, and backpropagates the first thing
# returned. NeMo hands the second things of all micro batches to `reduce`, for the log. A loss that
# gives `report` further values for each sample gets a column and a curve for each of them.
# ----------------------------------------------------------------------------------------------


class MSELossReduction(MeanLossReduction):
    """Mean squared error between images and their reconstructions."""

    def forward(
        self, batch: MnistBatch, forward_out: "ExampleModelOutput"
    ) -> tuple[Tensor, SameSizeLossDict]:
        """The loss of one micro batch."""
        x, x_hat = batch["data"].flatten(1).float(), forward_out["x_hat"]
        return self.report(nn.functional.mse_loss, x_hat, x, batch)


class ClassifierLossReduction(MeanLossReduction):
    """Cross entropy between labels and logits."""

    def forward(self, batch: MnistBatch, forward_out: Tensor) -> tuple[Tensor, SameSizeLossDict]:
        """The loss of one micro batch."""
        return self.report(nn.functional.cross_entropy, forward_out, batch["label"], batch)


# ----------------------------------------------------------------------------------------------
# Data
#
# Megatron asks every model-parallel rank for sample i and takes for granted that all get the same:
# a dataset is a function of the index. The dataset here is `MNISTCustom` in `mnist/dataset.py`.
# Megatron also reads samples strictly in sequence, so that a resumed run can skip what was
# consumed. Shuffling, epochs and random effects are therefore made by wrappers that compute them
# from the index.
# ----------------------------------------------------------------------------------------------


@dataclass
class DropPixels(BatchedMultiEpochDatasetWrapper[MnistItem, MnistItem]):
    """Sets a share of each image's pixels to 0, others in each epoch, for the model to restore.

    The pattern for every random effect: drawn from (seed, epoch, index) and nothing else, so that
    all ranks see the same and a resumed run goes on as if it had never stopped.
    """

    share: float = 0.0
    seed: int = 42

    def apply_transform_batch(self, batch: Any, index: EpochIndex) -> Any:
        shape = tuple(batch["data"].shape[1:])
        kept = bernoulli(1 - self.share, self.seed, index.epoch, index.idx, shape)
        # As bytes they multiply faster than as booleans.
        return {**batch, "corrupted": batch["data"] * torch.from_numpy(kept).byte()}


class MNISTDataModule(MegatronDataModule):
    """The tutorial's data: 55,000 images to train on, 5,000 to validate, 10,000 to test.

    Args:
        data_dir: Folder that holds `MNIST/raw`.
        batch_size: Micro batch size: samples per rank and forward pass.
        output_log: Whether NeMo's sampler logs its own figures.
        dataset: `mnist`, or the `digits` that ship with scikit-learn.
        corruption: Share of pixels dropped from training images.
        num_labels: Train on so few images, balanced over the classes; by default on all.
        options: Those of `MegatronDataModule`: `global_batch_size`, `seed`, `num_workers`.
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
        """Reads the images, on every rank. Lightning calls this with fit, validate, ..."""
        train, self.val_set, self.test_set = read_splits(
            self.data_dir, self.dataset, MNISTCustom.from_arrays
        )
        if self.num_labels is not None:
            train = balanced_subset(train, self.num_labels, self.seed)
        self.train_set = self.resample(self.with_random_effects(train))

    def with_random_effects(self, train: Any) -> Any:
        """Returns the training images as each epoch sees them, indexed by epoch and position."""
        if self.corruption:
            return DropPixels(train, self.corruption, self.seed)
        return IdentityMultiEpochDatasetWrapper(train)  # the same images in every epoch

    # The published tutorial's names.
    mnist_train = property(lambda self: self.train_set)
    mnist_val = property(lambda self: self.val_set)
    mnist_test = property(lambda self: self.test_set)


# ----------------------------------------------------------------------------------------------
# Models
#
# Megatron demands three things of a model: a config of type ModelParallelConfig, a `model_type`,
# and `set_input_tensor`, by which a later pipeline stage receives what the one before computed.
#
# Tensor parallelism cuts a pair of layers along the 64 numbers between them: the first by its
# outputs (column parallel), the second by its inputs (row parallel). Each rank computes its share
# of the 64 alone, and one all-reduce after the pair adds the shares up. ReLU works number by
# number, so it may stand between.
#
# Pipeline parallelism cuts between the encoder and what follows it: the first stage holds linear1
# and linear2, the second the decoder or the head, and z travels between them.
# ----------------------------------------------------------------------------------------------


class ExampleModelOutput(TypedDict):
    """What the autoencoder returns: reconstructions (B, 784), and the latent z (B, 3)."""

    x_hat: Tensor
    z: Tensor


class ExampleModelTrunk(MegatronModule):
    """The encoder, 784-64-3 at the default sizes, that both models share."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        # Which part of the pipeline this rank holds; with a single stage, both.
        self.pre_process = parallel_state.is_pipeline_first_stage()
        self.post_process = parallel_state.is_pipeline_last_stage()
        # A model that shares no weights between its first and its last stage has to say so.
        self.share_embeddings_and_output_weights = False
        self.input_tensor: Tensor | None = None
        if self.pre_process:
            self.linear1 = column_parallel_linear(config, 28 * 28, config.hidden_size, "linear1")
            self.relu = nn.ReLU()
            self.linear2 = row_parallel_linear(
                config, config.hidden_size, config.latent_size, "linear2"
            )

    def forward(self, x: Tensor) -> Any:
        """Encodes images (B, 1, 28, 28) as z (B, 3); a later stage takes z from the one before."""
        if self.pre_process:
            # Megatron's layers return their output and a bias for the caller to add; ours add it.
            z, _ = self.linear1(x.flatten(1))
            z, _ = self.linear2(self.relu(z))
        else:
            assert self.input_tensor is not None, "the pipeline's schedule sets it"
            z = self.input_tensor.squeeze(0)
        return z

    def to_next_stage(self, z: Tensor) -> Tensor:
        """Gives z the shape (sequence, batch, hidden) in which pipeline stages exchange tensors."""
        return z.unsqueeze(0)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor


class PretrainModel(ExampleModelTrunk):
    """The autoencoder: the trunk, and a decoder 3-64-784."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__(config)
        if self.post_process:
            self.linear3 = column_parallel_linear(
                config, config.latent_size, config.hidden_size, "linear3"
            )
            self.relu2 = nn.ReLU()
            self.linear4 = row_parallel_linear(config, config.hidden_size, 28 * 28, "linear4")

    def forward(self, x: Tensor) -> ExampleModelOutput | Tensor:
        """Reconstructs images (B, 1, 28, 28)."""
        z: Tensor = super().forward(x)
        if not self.post_process:
            return self.to_next_stage(z)
        x_hat, _ = self.linear3(z)
        x_hat, _ = self.linear4(self.relu2(x_hat))
        return {"x_hat": x_hat, "z": z}


class ExampleFineTuneModel(ExampleModelTrunk):
    """The classifier: the trunk, and a head 3-10."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__(config)
        if self.post_process:
            # Thirty weights are not worth cutting: every tensor-parallel rank has them all.
            with seeded(config.seed, "digit_classifier"):
                self.digit_classifier = nn.Linear(config.latent_size, 10)

    def forward(self, x: Tensor, return_latent: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Returns logits (B, 10) of images (B, 1, 28, 28); for prediction also the latent z."""
        z: Tensor = super().forward(x)
        if not self.post_process:
            return self.to_next_stage(z)
        logits: Tensor = self.digit_classifier(z)
        return (logits, z) if return_latent else logits


# ----------------------------------------------------------------------------------------------
# Configs
#
# A model cannot be built before the ranks know which part of it is theirs. So NeMo is given a
# config, and calls `configure_model` once parallelism is set up. The config also says which loss
# belongs to the model, and which checkpoint its first weights come from. NeMo writes it into the
# context of every checkpoint, so that the next stage builds a trunk of the same size. Fields of
# your own that the next stage shall not take from the checkpoint belong in
# `override_parent_fields`.
# ----------------------------------------------------------------------------------------------

ExampleModelT = TypeVar("ExampleModelT", bound=ExampleModelTrunk)


@dataclass
class ExampleGenericConfig(
    MegatronBioNeMoTrainableModelConfig[ExampleModelT, MegatronLossType], IOMixinWithGettersSetters
):
    """The sizes that both models have. A subclass names the classes of its model and loss."""

    loss_cls: type[MegatronLossType] = MSELossReduction
    hidden_size: int = SizeOptions.hidden_size  # of linear1 and linear3; tensor parallelism cuts it
    latent_size: int = SizeOptions.latent_size  # of z


@dataclass
class PretrainConfig(ExampleGenericConfig[PretrainModel, MSELossReduction]):
    """The autoencoder with its reconstruction loss."""

    model_cls: type[PretrainModel] = PretrainModel
    loss_cls: type[MSELossReduction] = MSELossReduction


@dataclass
class ExampleFineTuneConfig(ExampleGenericConfig[ExampleFineTuneModel, ClassifierLossReduction]):
    """The classifier with its cross entropy."""

    model_cls: type[ExampleFineTuneModel] = ExampleFineTuneModel
    loss_cls: type[ClassifierLossReduction] = ClassifierLossReduction

    def validation_metrics(self) -> dict[str, ValidationMetric]:
        """The share of validation images that are classified right, as `val_accuracy`."""
        return {"accuracy": accuracy_of_classes()}


def accuracy_of_classes() -> ValidationMetric:
    """The accuracy of a classifier whose output is logits (B, classes)."""
    return ValidationMetric(
        MulticlassAccuracy(average="micro"), lambda batch, logits: (logits, batch["label"])
    )


# ----------------------------------------------------------------------------------------------
# Lightning module
#
# NeMo's strategy takes over Lightning's steps: strategy -> MegatronParallel -> Megatron's schedule
# -> `training_step` below, once for each micro batch. That returns the model's output, not a loss:
# the schedule gets the loss from `training_loss_reduction`. The module serves any pair of model and
# loss, since the config names them.
# ----------------------------------------------------------------------------------------------


class BionemoLightningModule(pl.LightningModule, io.IOMixin, LightningPassthroughPredictionMixin):
    """Trains, validates and predicts with whatever model its config builds.

    Args:
        config: Builds the model and names its loss.
        optimizer: Megatron's Adam at a constant learning rate of 1e-4 by default.
    """

    def __init__(
        self,
        config: MegatronBioNeMoTrainableModelConfig,
        optimizer: MegatronOptimizerModule | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.optim = optimizer or megatron_adam(lr=1e-4)
        self.optim.connect(self)  # gives this module its configure_optimizers

    def configure_model(self) -> None:
        # On resuming NeMo may ask again; the model that is there stays.
        if not hasattr(self, "module"):
            self.module = self.config.configure_model()

    def forward(self, batch: MnistBatch, batch_idx: int | None = None, **options: Any) -> Any:
        """The model's output on a micro batch; Megatron's schedule calls this."""
        return self.module(batch.get("corrupted", batch["data"]), **options)

    def training_step(self, batch: MnistBatch, batch_idx: int | None = None) -> Any:
        return self(batch, batch_idx)

    # NeMo calls these two on stages that are not the last, and on the last in evaluation.
    forward_step = training_step
    validation_step = training_step

    def predict_step(self, batch: MnistBatch, batch_idx: int | None = None) -> Any:
        """The model's output with what is needed to know whose it is, or a stage's output."""
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
        """The loss that the config names."""
        return self.config.get_loss_reduction_class()

    def validation_metrics(self) -> dict[str, ValidationMetric]:
        """The metrics that the config names; `megakit` computes them at each validation."""
        return self.config.validation_metrics()
