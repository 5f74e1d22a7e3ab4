"""Masks patches of images, and shifts images, at random.

The random numbers depend only on the seed, the epoch and the sample's index.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from megakit.data import BatchedMultiEpochDatasetWrapper, EpochIndex, on_device, uniform


@dataclass
class MaskPatches(BatchedMultiEpochDatasetWrapper[Any, Any]):
    """Masks random patches of each image; each epoch has other patches."""

    share: float = 0.5
    patch_size: int = 7
    seed: int = 42

    def apply_transform_batch(self, batch: Any, index: EpochIndex) -> Any:
        """Adds `shown`, bool (B, 1, 28, 28), False for masked pixels, and the input `corrupted`."""
        rows, columns = (size // self.patch_size for size in batch["data"].shape[-2:])
        numbers = uniform(self.seed, index.epoch, index.idx, (rows * columns,))
        # Mask the patches with the smallest random numbers: equally many in each image.
        patches = numbers.argsort(axis=1).argsort(axis=1) >= round(self.share * rows * columns)
        pixels = np.ones((1, self.patch_size, self.patch_size), np.bool_)
        masks = np.kron(patches.reshape(-1, 1, rows, columns), pixels)
        shown = on_device(masks, like=batch["data"])
        # Masked pixels are -1, which no image contains; 0 is the background.
        return {**batch, "shown": shown, "corrupted": batch["data"].masked_fill(~shown, -1.0)}


@dataclass
class ShiftImages(BatchedMultiEpochDatasetWrapper[Any, Any]):
    """Shifts each image at random by up to `pixels` pixels, differently in each epoch."""

    pixels: int = 2
    seed: int = 42

    def apply_transform_batch(self, batch: Any, index: EpochIndex) -> Any:
        """Shifts the images of a batch; background fills the edges."""
        numbers = on_device(uniform(self.seed, index.epoch, index.idx, (2, 1)), like=batch["data"])
        start = (numbers * (2 * self.pixels + 1)).long()  # (B, 2, 1), from 0
        padded = nn.functional.pad(batch["data"], (self.pixels,) * 4)
        height, width = batch["data"].shape[-2:]
        image, *places = (torch.arange(n, device=start.device) for n in (len(start), height, width))
        row, column = start[:, 0] + places[0], start[:, 1] + places[1]
        data = padded[image[:, None, None], :, row[:, :, None], column[:, None, :]]
        return {**batch, "data": data.movedim(-1, 1).contiguous()}
