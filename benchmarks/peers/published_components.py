"""The parts of the published tutorial in our own words: how it reads, computes, logs and keeps.

Its errors are mended, and nothing of it is made faster: torchvision's images through ToTensor one
by one, plain `nn.Linear`, the loss in the model's precision, NeMo's own sampler and optimizer
module. See `published.py`.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.enums import ModelType
from nemo.lightning import io
from nemo.lightning.megatron_parallel import MegatronLossReduction
from nemo.lightning.pytorch.optim import MegatronOptimizerModule
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, random_split
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

from megakit.data import PRNGResampleDataset
from megakit.models import (
    OVERRIDE_BIONEMO_CONFIG_DEFAULTS,
    IOMixinWithGettersSetters,
    MegatronBioNeMoTrainableModelConfig,
)
from megakit.training import LightningPassthroughPredictionMixin


class _Mean(MegatronLossReduction):
    def reduce(self, losses_reduced_per_micro_batch: Any) -> Tensor:
        return torch.stack([loss["avg"] for loss in losses_reduced_per_micro_batch]).mean()


class Reconstruction(_Mean):
    """Mean squared error, in the model's precision."""

    def forward(self, batch: Any, forward_out: Any) -> tuple[Tensor, dict[str, Tensor]]:
        x_hat = forward_out["x_hat"]
        x = batch["data"].view(batch["data"].size(0), -1).to(x_hat.dtype)
        loss = nn.functional.mse_loss(x_hat, x)
        return loss, {"avg": loss}


class Classification(_Mean):
    """Cross entropy, in the model's precision."""

    def forward(self, batch: Any, forward_out: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss = nn.functional.cross_entropy(forward_out, batch["label"])
        return loss, {"avg": loss}


class Items(Dataset):
    """torchvision's MNIST as dictionaries."""

    def __init__(self, data_dir: Path, train: bool) -> None:
        self.mnist = MNIST(str(data_dir), train=train, transform=ToTensor())

    def __len__(self) -> int:
        return len(self.mnist)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = self.mnist[index]
        return {"data": x, "label": y, "idx": index}


class Data(pl.LightningDataModule):
    """Draws with replacement; micro batch and global batch are one."""

    def __init__(self, data_dir: Path, batch_size: int) -> None:
        super().__init__()
        self.data_dir, self.batch_size = data_dir, batch_size
        self.data_sampler = MegatronDataSampler(
            seq_len=1048,
            micro_batch_size=batch_size,
            global_batch_size=batch_size,
            rampup_batch_size=None,
            output_log=False,
        )

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(42)
        parts = random_split(Items(self.data_dir, True), [55_000, 5_000], generator)
        self.test: Any = PRNGResampleDataset(Items(self.data_dir, False), seed=43)
        self.train: Any = PRNGResampleDataset(parts[0], seed=44)
        self.val: Any = PRNGResampleDataset(parts[1], seed=45)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, num_workers=0)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=self.batch_size, num_workers=0)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=self.batch_size, num_workers=0)


class Trunk(MegatronModule):
    """784-64-3."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.linear1 = nn.Linear(784, 64)
        self.relu = nn.ReLU()
        self.linear2 = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Any:
        return self.linear2(self.relu(self.linear1(x.view(x.size(0), -1))))

    def set_input_tensor(self, input_tensor: Any) -> None:
        """A stub: there is one pipeline stage."""


class Autoencoder(Trunk):
    """784-64-3-64-784."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__(config)
        self.linear3 = nn.Linear(3, 64)
        self.relu2 = nn.ReLU()
        self.linear4 = nn.Linear(64, 784)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = super().forward(x)
        return {"x_hat": self.linear4(self.relu2(self.linear3(z))), "z": z}


class Classifier(Trunk):
    """784-64-3-10."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__(config)
        self.digit_classifier = nn.Linear(3, 10)

    def forward(self, x: Tensor) -> Any:
        return self.digit_classifier(super().forward(x))


@dataclass
class AutoencoderConfig(
    MegatronBioNeMoTrainableModelConfig["Autoencoder", "Reconstruction"], IOMixinWithGettersSetters
):
    """The autoencoder and its loss."""

    model_cls: type[Autoencoder] = Autoencoder
    loss_cls: type[MegatronLossReduction] = Reconstruction
    hidden_size: int = 64
    num_attention_heads: int = 1
    num_layers: int = 1
    override_parent_fields: list[str] = field(
        default_factory=lambda: [*OVERRIDE_BIONEMO_CONFIG_DEFAULTS, "loss_cls"]
    )

    def get_loss_reduction_class(self) -> type[MegatronLossReduction]:
        return self.loss_cls


@dataclass
class ClassifierConfig(AutoencoderConfig):
    """The classifier and its loss."""

    model_cls: type[Any] = Classifier
    loss_cls: type[MegatronLossReduction] = Classification


class Module(pl.LightningModule, io.IOMixin, LightningPassthroughPredictionMixin):
    """Without a `validation_step`, as published: NeMo then never validates it."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        self.optim = MegatronOptimizerModule(
            config=OptimizerConfig(
                lr=1e-4,
                optimizer="adam",
                # With torch's AdamW this Megatron cannot save the distributed one.
                use_distributed_optimizer=False,
                bf16=config.bf16,
                fp16=config.fp16,
                params_dtype=config.params_dtype,
            )
        )
        self.optim.connect(self)

    def configure_model(self) -> None:
        self.module = self.config.configure_model()

    def forward(self, batch: Any, batch_idx: int | None = None) -> Any:
        return self.module(batch["data"])

    def training_step(self, batch: Any, batch_idx: int | None = None) -> Any:
        return self(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int | None = None) -> Any:
        return self(batch, batch_idx)

    def training_loss_reduction(self) -> MegatronLossReduction:
        return self.config.get_loss_reduction_class()()

    validation_loss_reduction = training_loss_reduction
    test_loss_reduction = training_loss_reduction


class Tracker(pl.Callback):
    """Keeps every step's loss, and notes when steps ended."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.ends: list[float] = []
        self.processor: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ends.append(time.time())
        self.processor.append(time.process_time())
        self.losses.append(outputs["loss"])
