"""Defines the parts of a vision transformer, in the order of the tutorial's `model_components.py`.

In pretraining, the model reconstructs masked patches of images. Its trunk then becomes a digit
classifier. The data module and the classifier's loss come from `model_components.py`, where the
scripts also find the Lightning module and the trainer.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

# Before all other imports of Megatron; its docstring gives the reason.
import megakit.runtime.import_megatron  # isort: skip  # noqa: F401
import torch
from megatron.core import parallel_state
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from examples.vit.random_effects import MaskPatches, ShiftImages
from examples.vit.vit_sizes import HIDDEN_SIZE, NUM_HEADS, NUM_LAYERS
from megakit.data import MultiEpochDatasetResampler
from megakit.models import (
    IOMixinWithGettersSetters,
    MegatronBioNeMoTrainableModelConfig,
    MegatronLossType,
    seeded,
    transformer_layer_spec,
)
from megakit.training import SameSizeLossDict, ValidationMetric
from model_components import (
    ClassifierLossReduction,
    MNISTDataModule,
    MSELossReduction,
    accuracy_of_classes,
)

# --- Losses ---------------------------------------------------------------------------------------


class MaskedLossReduction(MSELossReduction):
    """Computes the squared errors of the masked pixels, divided by the number of all pixels.

    Visible pixels have error 0. All images have equally many masked pixels, so all images, micro
    batches and ranks have the same weight.
    """

    def forward(self, batch: Any, forward_out: Any) -> tuple[Tensor, SameSizeLossDict]:
        """Returns the loss of one micro batch and the report for the log."""
        shown = batch["shown"]
        target: Any = {**batch, "data": batch["data"].masked_fill(shown, 0)}
        restored: Any = {"x_hat": forward_out["x_hat"].masked_fill(shown.flatten(1), 0)}
        return super().forward(target, restored)


# --- Data -----------------------------------------------------------------------------------------


class VitDataModule(MNISTDataModule):
    """Provides the tutorial's data with masked patches, or with shifted training images.

    Args:
        *args: Arguments of `MNISTDataModule`.
        masked_share: Share of the patches to mask.
        shift: Largest shift of training images, in pixels; only without masked patches.
        **options: Options of `MNISTDataModule`.
    """

    def __init__(
        self, *args: Any, masked_share: float = 0.0, shift: int = 0, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.masked_share, self.shift = masked_share, shift

    def setup(self, stage: str) -> None:
        """Reads the images, and masks patches of the validation images, too."""
        super().setup(stage)
        if self.masked_share:
            # All validations read epoch 0 without shuffling, so they mask the same patches.
            hidden = MaskPatches(self.val_set, self.masked_share, seed=self.seed)
            self.val_set = MultiEpochDatasetResampler(hidden, shuffle=False)

    def with_random_effects(self, train: Any) -> Any:
        """Wraps the training images in a dataset with the index (epoch, sample index)."""
        if self.masked_share:
            return MaskPatches(train, self.masked_share, seed=self.seed)
        if self.shift:
            return ShiftImages(train, self.shift, self.seed)
        return super().with_random_effects(train)


# --- Models ---------------------------------------------------------------------------------------
# Megatron's TransformerBlock implements tensor and pipeline parallelism. It distributes its layers
# to the pipeline stages, and shards each layer's heads and widths over the tensor-parallel ranks.
# The layers before and after the block are small. They are replicated on all tensor-parallel ranks
# of the first and the last stage. Tokens have the shape (sequence, batch, hidden), in which
# pipeline stages exchange them.


class VitTrunk(MegatronModule):
    """Encodes images for both models: an embedding of patches as tokens, and a transformer.

    Args:
        config: Sizes, precision and layout.
    """

    def __init__(self, config: "VitConfig") -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = parallel_state.is_pipeline_first_stage()
        self.post_process = parallel_state.is_pipeline_last_stage()
        self.share_embeddings_and_output_weights = False
        if self.pre_process:
            with seeded(config.seed, "embedding"):
                self.embedding = nn.Linear(config.numbers_per_patch, config.hidden_size)
                self.position = nn.Parameter(
                    0.02 * torch.randn(config.num_patches, 1, config.hidden_size)
                )
        self.transformer = TransformerBlock(
            config,
            transformer_layer_spec(),
            pre_process=self.pre_process,
            post_process=self.post_process,
        )

    def forward(self, x: Tensor) -> Any:
        """Encodes images (B, 1, 28, 28) as tokens (S, B, H), one for each patch."""
        tokens = None  # a later stage receives tokens by set_input_tensor
        if self.pre_process:
            tokens = self.embedding(to_patches(x, self.config.patch_size)) + self.position
        return self.transformer(tokens, attention_mask=None)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Receives the previous stage's output from Megatron's schedule."""
        tokens = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self.transformer.set_input_tensor(tokens)


class VitPretrainModel(VitTrunk):
    """Reconstructs images: the trunk, and a linear layer that maps each token to a patch."""

    def __init__(self, config: "VitConfig") -> None:
        super().__init__(config)
        if self.post_process:
            with seeded(config.seed, "unembedding"):
                self.unembedding = nn.Linear(config.hidden_size, config.numbers_per_patch)

    def forward(self, x: Tensor) -> dict[str, Tensor] | Tensor:
        """Reconstructs images (B, 1, 28, 28); x_hat is (B, 784)."""
        tokens: Tensor = super().forward(x)
        if not self.post_process:
            return tokens
        return {"x_hat": to_images(self.unembedding(tokens), self.config.patch_size).flatten(1)}


class VitClassifier(VitTrunk):
    """Classifies images: the trunk, and a linear head on the mean of all tokens."""

    def __init__(self, config: "VitConfig") -> None:
        super().__init__(config)
        if self.post_process:
            with seeded(config.seed, "head"):
                self.head = nn.Linear(config.hidden_size, config.num_classes)

    def forward(self, x: Tensor, return_latent: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Returns logits (B, classes) of images, and on request the mean token z (B, H)."""
        tokens: Tensor = super().forward(x)
        if not self.post_process:
            return tokens
        z = tokens.mean(dim=0)
        logits: Tensor = self.head(z)
        return (logits, z) if return_latent else logits


def to_patches(images: Tensor, size: int) -> Tensor:
    """Cuts images (B, C, height, width) into patches (S, B, C * size * size), row by row."""
    patches = images.unfold(2, size, size).unfold(3, size, size)  # (B, C, rows, columns, ...)
    return patches.permute(2, 3, 0, 1, 4, 5).flatten(3).flatten(0, 1)


def to_images(patches: Tensor, size: int) -> Tensor:
    """Assembles patches (S, B, C * size * size) into square images (B, C, height, width)."""
    side, batch = round(len(patches) ** 0.5), patches.shape[1]
    grid = patches.view(side, side, batch, -1, size, size).permute(2, 3, 0, 4, 1, 5)
    return grid.flatten(4).flatten(2, 3)


# --- Configs --------------------------------------------------------------------------------------

VitModelT = TypeVar("VitModelT", bound=VitTrunk)


@dataclass
class VitConfig(
    MegatronBioNeMoTrainableModelConfig[VitModelT, MegatronLossType], IOMixinWithGettersSetters
):
    """Holds the sizes of both models; each subclass names its model class and its loss class."""

    image_size: int = 28
    channels: int = 1
    patch_size: int = 7
    num_classes: int = 10
    num_layers: int = NUM_LAYERS
    hidden_size: int = HIDDEN_SIZE
    num_attention_heads: int = NUM_HEADS
    # No dropout, because its random numbers would differ between layouts.
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    init_method_std: float = 0.1  # about 1 / sqrt(hidden_size); Megatron's 0.02 is for wide models

    @property
    def num_patches(self) -> int:
        """Number of patches, and so of tokens, of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def numbers_per_patch(self) -> int:
        """Number of values in a patch."""
        return self.channels * self.patch_size**2

    @property
    def stage_shape(self) -> tuple[int, int]:
        """Sequence length and width of what a pipeline stage sends for each image: its tokens."""
        return self.num_patches, self.hidden_size


@dataclass
class VitPretrainConfig(VitConfig[VitPretrainModel, MaskedLossReduction]):
    """Configures the model that reconstructs masked patches, and its loss."""

    model_cls: type[VitPretrainModel] = VitPretrainModel
    loss_cls: type[MaskedLossReduction] = MaskedLossReduction


@dataclass
class VitClassifierConfig(VitConfig[VitClassifier, ClassifierLossReduction]):
    """Configures the classifier and its cross-entropy loss."""

    model_cls: type[VitClassifier] = VitClassifier
    loss_cls: type[ClassifierLossReduction] = ClassifierLossReduction

    def validation_metrics(self) -> dict[str, ValidationMetric]:
        """Returns the metrics of a validation by name; `accuracy` is logged as `val_accuracy`."""
        return {"accuracy": accuracy_of_classes()}
