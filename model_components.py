"""Defines the parts of the MNIST tutorial: losses, data, models, configs, Lightning module.

Three scripts use these parts. `model_pretrain.py` pretrains an autoencoder. `model_finetune.py`
turns the autoencoder's encoder, the trunk, into a digit classifier. `model_predict.py` classifies
the test images. The comment above each part says what NeMo or Megatron requires of this part, and
why. To train a model of your own, copy this file and change the copy. Names with BioNeMo or Example
come from NVIDIA BioNeMo's MNIST tutorial. The package BioNeMo is not needed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

# Before all other imports of Megatron; its docstring gives the reason.
import megakit.runtime.import_megatron  # isort: skip  # noqa: F401
import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import ModelType
from nemo import lightning as nl
from nemo.lightning import io
from nemo.lightning.megatron_parallel import MegatronLossReduction
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from megakit.data import (
    BatchedMultiEpochDatasetWrapper,
    EpochIndex,
    IdentityMultiEpochDatasetWrapper,
    MegatronDataModule,
    another_name,
    balanced_subset,
    bernoulli_like,
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
    MetricTracker as MetricTracker,  # only the published tutorial uses it
    SameSizeLossDict,
    ValidationMetric,
    megatron_adam,
)
from mnist.dataset import (
    MnistBatch as MnistBatch,
    MNISTCustom as MNISTCustom,
    MnistItem as MnistItem,
)
from mnist.files import read_splits
from mnist.sizes import SizeOptions

# --- Losses ---------------------------------------------------------------------------------------
# Megatron splits the samples of a training step into micro batches. For each micro batch, Megatron
# calls the loss's `forward` on the last pipeline stage. `forward` returns a loss and a report.
# Megatron backpropagates the loss. NeMo passes the reports of all micro batches to the loss's
# `reduce`, which returns the value to log.
#
# `MeanLossReduction` defines `reduce`: the mean over micro batches and data-parallel ranks. Its
# method `report` builds the loss and the report from a torch loss. `report` also accepts named
# values, one per sample. Each name gets a column in metrics.csv and a TensorBoard curve.


class MSELossReduction(MeanLossReduction):
    """Computes the mean squared error between images and their reconstructions.

    The target is the original image, so the autoencoder learns to restore corrupted pixels.
    """

    def forward(
        self, batch: MnistBatch, forward_out: "ExampleModelOutput"
    ) -> tuple[Tensor, SameSizeLossDict]:
        """Returns the loss of one micro batch and the report for the log."""
        x, x_hat = batch["data"].flatten(1).float(), forward_out["x_hat"]
        return self.report(nn.functional.mse_loss, x_hat, x, batch)


class ClassifierLossReduction(MeanLossReduction):
    """Computes the cross entropy between labels and logits, the usual loss of a classifier."""

    def forward(self, batch: MnistBatch, forward_out: Tensor) -> tuple[Tensor, SameSizeLossDict]:
        """Returns the loss of one micro batch and the report for the log."""
        return self.report(nn.functional.cross_entropy, forward_out, batch["label"], batch)


# --- Data -----------------------------------------------------------------------------------------
# All ranks of a replica, one copy of the model, load the same samples, each rank on its own.
# Megatron does not check that the samples are equal. A sample must therefore depend only on its
# index. The dataset is `MNISTCustom` in `mnist/dataset.py`.
#
# NeMo requires a `data_sampler` with the batch sizes. By default, it reads the indices 0, 1, 2, ...
# in this order. A resumed run skips the consumed indices. The base class of the data module, in
# `megakit/nemo/datamodule.py`, builds the sampler, and its method `resample` computes the epoch and
# the shuffled sample from the index. `DropPixels` computes the random effects from both.


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


class MNISTDataModule(MegatronDataModule):
    """Provides the samples for training, validation and test.

    MNIST has 55,000, 5,000 and 10,000 images in these three sets. The base class builds the data
    loaders, so this class only assigns the sets.

    Args:
        data_dir: Folder that contains `MNIST/raw`; None if no file of MNIST is read.
        batch_size: Micro batch size: samples per rank and forward pass.
        output_log: Whether NeMo's sampler logs its own metrics.
        dataset: `mnist`, or `digits` from scikit-learn.
        corruption: Share of the pixels of each training image to set to 0.
        num_labels: Number of labelled images to train on, balanced over the classes; default: all.
        options: Options of `MegatronDataModule`: `global_batch_size`, `seed`, `num_workers`.
    """

    def __init__(
        self,
        data_dir: str | Path | None = "./",
        batch_size: int = 32,
        output_log: bool = False,
        *,
        dataset: str = "mnist",
        corruption: float = 0.0,
        num_labels: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, output_log=output_log, **options)
        self.max_len = self.data_sampler.seq_len  # only the published tutorial uses it
        self.data_dir, self.dataset = Path(data_dir or "data"), dataset
        self.corruption, self.num_labels = corruption, num_labels

    def setup(self, stage: str) -> None:
        """Reads the images. Lightning calls this method on every rank."""
        train, self.val_set, self.test_set = read_splits(
            self.data_dir, self.dataset, MNISTCustom.from_arrays
        )
        if self.num_labels is not None:
            train = balanced_subset(train, self.num_labels, self.seed)
        self.train_set = self.resample(self.with_random_effects(train))

    def with_random_effects(self, train: Any) -> Any:
        """Wraps the training images in a dataset with the index (epoch, sample index)."""
        if self.corruption:
            return DropPixels(train, self.corruption, self.seed)
        return IdentityMultiEpochDatasetWrapper(train)  # equal images in every epoch

    # The published tutorial's names. A copy can delete these, `max_len` and `MetricTracker`.
    mnist_train = another_name("train_set")
    mnist_val = another_name("val_set")
    mnist_test = another_name("test_set")


# --- Models ---------------------------------------------------------------------------------------
# Megatron requires three attributes of a model: a config of type TransformerConfig, even if the
# model is no transformer, `model_type`, and `set_input_tensor`; with several pipeline stages also
# `share_embeddings_and_output_weights`. Megatron's schedule runs the passes of all micro batches.
# On each stage but the first, it hands the output of the previous stage to `set_input_tensor`.
#
# Tensor parallelism shards two consecutive linear layers along the 64 features between them: the
# first by its outputs (column parallel), the second by its inputs (row parallel). Each rank
# computes its shard without communication, ReLU included. After the second layer, one all-reduce
# sums the results of the ranks.
#
# Pipeline parallelism splits each model after the encoder. The first stage has linear1 and linear2,
# and sends the latent vectors z to the second stage, which has the decoder or the head.


class ExampleModelOutput(TypedDict):
    """Holds the autoencoder's output for B images."""

    x_hat: Tensor  # reconstructions (B, 784)
    z: Tensor  # latent vectors (B, 3)


class ExampleModelTrunk(MegatronModule):
    """Encodes images as latent vectors; the layers have 784, 64 and 3 features.

    Both models inherit the trunk. Its weights have equal names in both models, so the classifier
    loads them from the autoencoder's checkpoint.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder  # Megatron's only type, for every model
        # Whether this rank's stage is the first or the last. With one stage, both values are true.
        self.pre_process = parallel_state.is_pipeline_first_stage()
        self.post_process = parallel_state.is_pipeline_last_stage()
        # True only if the first and the last stage share the weights of an embedding.
        self.share_embeddings_and_output_weights = False
        self.input_tensor: Tensor | None = None
        if self.pre_process:
            self.linear1 = column_parallel_linear(config, 28 * 28, config.hidden_size, "linear1")
            self.relu = nn.ReLU()
            self.linear2 = row_parallel_linear(
                config, config.hidden_size, config.latent_size, "linear2"
            )

    def forward(self, x: Tensor) -> Any:
        """Encodes images (B, 1, 28, 28) as z (B, 3); on the second stage, returns z as received."""
        # Megatron's layers return (output, bias). These add the bias; the second value is None.
        if self.pre_process:
            z, _ = self.linear1(x.flatten(1))
            z, _ = self.linear2(self.relu(z))
        else:
            assert self.input_tensor is not None, "Megatron's schedule sets input_tensor"
            z = self.input_tensor.squeeze(0)
        return z

    def to_next_stage(self, z: Tensor) -> Tensor:
        """Reshapes z to (1, B, 3): pipeline stages exchange (sequence, batch, hidden)."""
        return z.unsqueeze(0)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor


class PretrainModel(ExampleModelTrunk):
    """Reconstructs images: an autoencoder of the trunk and a decoder with 3, 64, 784 features.

    Pretraining needs no labels. The trunk learns features that fine-tuning starts from.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        if self.post_process:
            self.linear3 = column_parallel_linear(
                config, config.latent_size, config.hidden_size, "linear3"
            )
            self.relu2 = nn.ReLU()
            self.linear4 = row_parallel_linear(config, config.hidden_size, 28 * 28, "linear4")

    def forward(self, x: Tensor) -> ExampleModelOutput | Tensor:
        """Encodes images (B, 1, 28, 28) and reconstructs them."""
        z: Tensor = super().forward(x)
        if not self.post_process:
            return self.to_next_stage(z)
        x_hat, _ = self.linear3(z)
        x_hat, _ = self.linear4(self.relu2(x_hat))
        return {"x_hat": x_hat, "z": z}


class ExampleFineTuneModel(ExampleModelTrunk):
    """Classifies images: the trunk and a linear head with 3 inputs and 10 outputs.

    The head has only 30 weights, so tensor parallelism replicates the head on all ranks.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        if self.post_process:
            # All ranks draw equal weights, from `seed` (of the config's base class) and the name.
            with seeded(config.seed, "digit_classifier"):
                self.digit_classifier = nn.Linear(config.latent_size, 10)

    def forward(self, x: Tensor, return_latent: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Returns logits (B, 10) of images (B, 1, 28, 28); on request, also the latent z (B, 3)."""
        z: Tensor = super().forward(x)
        if not self.post_process:
            return self.to_next_stage(z)
        logits: Tensor = self.digit_classifier(z)
        return (logits, z) if return_latent else logits


# --- Configs --------------------------------------------------------------------------------------
# Each rank allocates only its shard of the model. The model can therefore be built only after NeMo
# has set up the process groups. The Lightning module receives a config instead of a model, and the
# Trainer calls `configure_model` when the process groups exist.
#
# The config also names the loss class and the checkpoint of the initial weights. Its base class in
# `megakit/nemo/config.py` has more fields, such as `seed`. `IOMixinWithGettersSetters` records
# the fields, also when they change, and NeMo writes the record into each checkpoint. From it, the
# next script reads the sizes of the trunk. The fields in the list `override_parent_fields` keep the
# script's values instead: by default the classes, seed, layout, precision and start checkpoint.

ExampleModelT = TypeVar("ExampleModelT", bound=ExampleModelTrunk)


@dataclass
class ExampleGenericConfig(
    MegatronBioNeMoTrainableModelConfig[ExampleModelT, MegatronLossType], IOMixinWithGettersSetters
):
    """Holds the sizes of both models; each subclass names its model class and its loss class."""

    loss_cls: type[MegatronLossType] = MSELossReduction
    hidden_size: int = SizeOptions.hidden_size  # of linear1, linear3; sharded by tensor parallelism
    latent_size: int = SizeOptions.latent_size  # of z

    @property
    def stage_shape(self) -> tuple[int, int]:
        """Sequence length and width of z, which a pipeline stage sends; the strategy reads it.

        By default, Megatron expects the data's sequence length and the config's `hidden_size`.
        """
        return 1, self.latent_size


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
        """Returns the metrics of a validation by name; `accuracy` is logged as `val_accuracy`."""
        return {"accuracy": accuracy_of_classes()}


def accuracy_of_classes() -> ValidationMetric:
    """Returns a metric: the share of images whose label has the largest logit (B, classes)."""
    return ValidationMetric(
        MulticlassAccuracy(average="micro"), lambda batch, logits: (logits, batch["label"])
    )


# --- Lightning module -----------------------------------------------------------------------------
# NeMo's strategy replaces Lightning's training step by a call of Megatron's schedule, which calls
# `training_step` for each micro batch. `training_step` returns the model's output, not the loss.
# Megatron's schedule then calls the loss, which `training_loss_reduction` returns. The config names
# the model and the loss, so this module works with any pair of model and loss.


class BionemoLightningModule(pl.LightningModule, io.IOMixin, LightningPassthroughPredictionMixin):
    """Trains, validates and predicts with the model that the config builds.

    `IOMixin` records the arguments, which NeMo writes into each checkpoint. The other mixin makes
    prediction return the outputs instead of a loss.

    Args:
        config: Builds the model and names the loss class.
        optimizer: By default Megatron's Adam with a constant learning rate of 1e-4.
    """

    def __init__(
        self,
        config: MegatronBioNeMoTrainableModelConfig,
        optimizer: nl.MegatronOptimizerModule | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.optim = optimizer or megatron_adam(lr=1e-4)
        self.optim.connect(self)  # adds `configure_optimizers` to this module

    def configure_model(self) -> None:
        # The Trainer may call this method again when a run resumes. The first model is kept.
        if not hasattr(self, "module"):
            self.module = self.config.configure_model()

    def forward(self, batch: MnistBatch, batch_idx: int | None = None, **options: Any) -> Any:
        """Returns the model's output for one micro batch."""
        return self.module(batch.get("corrupted", batch["data"]), **options)

    def training_step(self, batch: MnistBatch, batch_idx: int | None = None) -> Any:
        return self(batch, batch_idx)

    # The last pipeline stage calls `training_step` and `validation_step`, others `forward_step`.
    forward_step = training_step
    validation_step = training_step

    def predict_step(self, batch: MnistBatch, batch_idx: int | None = None) -> Any:
        """Returns a dict: the `output`, and the batch's `idx`, `label` and `loss_mask` if present.

        Before the last pipeline stage, this method returns only the output, for the next stage.
        """
        has_latent = returns_latent(self.config.model_cls)  # whether `forward` has `return_latent`
        output = self(batch, return_latent=True) if has_latent else self(batch)
        if not parallel_state.is_pipeline_last_stage():
            return output
        kept = ("idx", "label", "loss_mask")
        outputs: dict[str, Any] = {key: value for key, value in batch.items() if key in kept}
        if has_latent:
            output, outputs["latent"] = output
        return {"output": output, **outputs}

    def training_loss_reduction(self) -> MegatronLossReduction:
        return self.loss_reduction_class()()

    validation_loss_reduction = test_loss_reduction = training_loss_reduction

    def loss_reduction_class(self) -> type[MegatronLossReduction]:
        return self.config.get_loss_reduction_class()

    def validation_metrics(self) -> dict[str, ValidationMetric]:
        """Returns the config's metrics; `megakit` computes them in each validation."""
        return self.config.validation_metrics()
