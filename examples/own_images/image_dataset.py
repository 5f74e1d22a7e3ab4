"""Images from folders as Megatron wants them: a function of the index, all of one form.

Nothing here knows the images' size, channels or classes: they are resized to what the model is
built for, always have three channels, and the classes are the folders' names.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from examples.own_images.image_files import (
    FORMATS,
    REMEDY,
    check_folders,
    list_classes,
    list_images,
)
from megakit.data.foreign_images import read_image
from megakit.runtime.foreign_files import reading

SIZE = 32
CHANNELS = 3


class FolderImages(Dataset[Any]):
    """One split; an item holds data, float32 (3, size, size) in [0, 1], label and idx.

    Args:
        data_dir: Folder of the splits.
        split: `train`, `val` or `test`.
        size: Height and width that each image is resized to.
    """

    def __init__(self, data_dir: Path, split: str, size: int = SIZE) -> None:
        self.paths, self.size = list_images(data_dir / split), size
        # By the training images' classes: a split may lack some.
        self.labels = {name: k for k, name in enumerate(list_classes(data_dir / "train"))}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        path = self.paths[index]
        with reading(path, REMEDY):
            image = read_image(path, FORMATS).convert("RGB").resize((self.size, self.size))
        pixels = np.asarray(image, np.float32)
        data = torch.from_numpy(pixels / 255).movedim(2, 0).contiguous()
        return {"data": data, "label": self.labels[path.parent.name], "idx": index % len(self)}


def training_images() -> FolderImages:
    """For `python -m megakit.testing examples.own_images.image_dataset:training_images`."""
    folder = Path("sample-images")
    check_folders(folder)  # or an empty dataset would be all that is said
    return FolderImages(folder, "train")
