"""Provides the tutorial's training samples as tensors, by index, for the loops in `ladder/`.

The samples equal those of `MNISTDataModule` in `model_components.py`. This module imports neither
NeMo nor Lightning nor Megatron.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from megakit.data import EpochIndex, MultiEpochDatasetResampler, bernoulli
from megakit.data.indices import IntArray
from megakit.job.option_types import INT32_MAX, BatchSize, Range, broken_rules
from mnist.files import DataOptions, read_splits


@dataclass(kw_only=True)
class LadderOptions(DataOptions):
    """Train the tutorial's autoencoder for some steps, and print the loss of each step."""

    steps: Annotated[int, Range(least=2, most=INT32_MAX)] = 50
    """Optimizer steps to train for."""

    batch_size: BatchSize = 128
    """Samples per optimizer step."""

    precision: Literal["32", "bf16-mixed"] = "32"
    """32: float32. bf16-mixed: the layers compute in bfloat16."""

    def problems(self) -> list[str]:
        """Returns one message per option with an invalid value."""
        return broken_rules(self)


class TrainingSamples:
    """Training images with random pixels set to 0, in another order in each epoch.

    A sample is a function of its index. `samples[a:b]` has the samples from a up to b as two
    tensors, float32 (b - a, 784) in [0, 1]: the model's input, and the complete images.

    Args:
        options: Which images; missing files are downloaded.
        num_samples: Number of samples over all epochs.
        seed: Seed of the order and of the pixels.
        corruption: Share of the pixels to set to 0.
    """

    def __init__(
        self, options: DataOptions, num_samples: int, seed: int = 42, corruption: float = 0.2
    ) -> None:
        dataset = options.fingerprint()
        images = _Images(options.data_dir or Path("data"), dataset, seed, corruption)
        self.resampled = MultiEpochDatasetResampler(images, num_samples=num_samples, seed=seed)

    def __getitem__(self, some: slice) -> tuple[Tensor, Tensor]:
        samples: tuple[Tensor, Tensor] = self.resampled.get_batch(np.arange(some.start, some.stop))
        return samples

    def __len__(self) -> int:
        return len(self.resampled)


class _Images:
    """The training images of one epoch, by pairs of epoch and index."""

    def __init__(self, data_dir: Path, dataset: str, seed: int, corruption: float) -> None:
        train = read_splits(data_dir, dataset, lambda images, labels: images)[0]
        self.images = train.dataset[train.indices] if isinstance(train, Subset) else train
        self.seed, self.corruption = seed, corruption

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: EpochIndex) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("only whole batches are read")

    def get_batch(self, index: EpochIndex[IntArray]) -> tuple[Tensor, Tensor]:
        images = torch.from_numpy(self.images[index.idx]).flatten(1).float().div_(255)
        if not self.corruption:
            return images, images
        kept = bernoulli(1 - self.corruption, self.seed, index.epoch, index.idx, (784,))
        return images * torch.from_numpy(kept), images
