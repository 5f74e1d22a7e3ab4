"""Provides the images as a dataset, by single samples and by whole batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megakit.data import on_device, take
from mnist.files import find_dataset, read_mnist


class MnistItem(TypedDict):
    """One image with its label."""

    data: Tensor  # float32 (1, 28, 28) in [0, 1]
    label: int
    idx: int  # position in the file


class MnistBatch(TypedDict):
    """A batch of B images from a data loader."""

    data: Tensor  # float32 (B, 1, 28, 28) in [0, 1]
    label: Tensor  # int64 (B,)
    idx: Tensor  # int64 (B,)
    corrupted: NotRequired[Tensor]  # like data; if present, the model's input instead of data
    loss_mask: NotRequired[Tensor]  # float32 (B,), only in evaluation; 0 for padding


class MNISTCustom(Dataset[MnistItem]):
    """Provides MNIST with dictionaries as samples. A sample depends only on its index.

    Args:
        root: Folder that contains `MNIST/raw`.
        train: True for the 60,000 training images, False for the 10,000 test images.
        transform: Applied to each PIL image instead of the conversion to float32 in [0, 1].
        download: Whether to download missing files.
    """

    transform: Callable[[Any], Tensor] | None = None

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        transform: Callable[[Any], Tensor] | None = None,
        download: bool = False,
    ) -> None:
        if download:
            find_dataset(Path(root), "mnist")
        self.images, self.labels = read_mnist(Path(root), train)
        self.transform = transform

    @classmethod
    def from_arrays(cls, images: NDArray[np.uint8], labels: NDArray[Any]) -> "MNISTCustom":
        """Builds a dataset from other images (N, 28, 28) and their labels (N,)."""
        dataset = cls.__new__(cls)
        dataset.images, dataset.labels = images, labels
        return dataset

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> MnistItem:
        batch = self.get_batch(np.array([index]))
        return {"data": batch["data"][0], "label": int(batch["label"]), "idx": int(batch["idx"])}

    def get_batch(self, indices: NDArray[np.int64]) -> MnistBatch:
        """Returns a collated batch; this is many times faster than collating single samples."""
        rows = on_device(indices)
        if self.transform is None:
            data = take(self.images, rows).unsqueeze(1).float().div_(255)
        else:
            from PIL import Image

            images = map(Image.fromarray, self.images[indices])
            data = torch.stack([self.transform(image) for image in images])
        label = take(self.labels, rows).long()
        return {"data": data, "label": label, "idx": rows % len(self)}
