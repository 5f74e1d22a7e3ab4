"""Provides the images of folders as a dataset whose samples depend on the index only.

The images may have any size, any channels and any classes. All images are resized to the model's
input size and converted to three channels. The classes are the names of the folders.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import Dataset

from examples.own_images.image_files import (
    FORMATS,
    REMEDY,
    list_classes,
    list_images,
)
from megakit.errors import reading

SIZE = 32
CHANNELS = 3


class FolderImages(Dataset[Any]):
    """Provides one split: samples with data, float32 (3, size, size) in [0, 1], label, idx.

    Args:
        data_dir: Folder that contains the splits.
        split: `train`, `val` or `test`.
        size: Height and width that each image is resized to.
    """

    def __init__(self, data_dir: Path, split: str, size: int = SIZE) -> None:
        self.paths, self.size = list_images(data_dir / split), size
        # Labels follow the classes of the training images, as another split may lack classes.
        self.labels = {name: k for k, name in enumerate(list_classes(data_dir / "train"))}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        path = self.paths[index]
        with reading(path, REMEDY), Image.open(path, formats=FORMATS) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        pixels = np.asarray(upright.resize((self.size, self.size)), np.float32)
        data = torch.from_numpy(pixels / 255).movedim(2, 0).contiguous()
        return {"data": data, "label": self.labels[path.parent.name], "idx": index % len(self)}
