"""Images from folders as Megatron wants them; the model is the vision transformer of examples/vit.

Nothing here knows the images' size, channels or classes: they are resized to what the model is
built for, always have three channels, and the classes are the folders' names.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from examples.own_images.image_files import list_classes, list_images
from examples.vit.vit_components import ShiftImages
from megakit.data import ExactDataSampler, MegatronDataModule, MultiEpochDatasetResampler

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
        index = range(len(self))[index]  # raises IndexError where there is none
        path = self.paths[index]
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB").resize((self.size, self.size)), np.float32)
        data = torch.from_numpy(pixels / 255).movedim(2, 0).contiguous()
        return {"data": data, "label": self.labels[path.parent.name], "idx": index}


def training_images() -> FolderImages:
    """For `python -m megakit.testing examples.own_images.image_components:training_images`."""
    return FolderImages(Path("data/images"), "train")


class FolderDataModule(MegatronDataModule):
    """The three splits; training images are shifted a little, in another way in each epoch.

    Args:
        data_dir: Folder of the splits.
        micro_batch_size: Samples per rank and forward pass.
        global_batch_size: Samples per step over all ranks.
        seed: Of the order of samples and of the shifts.
        shift: Largest shift, in pixels.
        num_workers: Processes that read images ahead.
    """

    def __init__(
        self,
        data_dir: Path,
        micro_batch_size: int,
        global_batch_size: int,
        *,
        seed: int = 42,
        shift: int = 2,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.data_dir, self.seed, self.shift = data_dir, seed, shift
        self.num_workers = num_workers
        self.data_sampler = ExactDataSampler(
            seq_len=1,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            output_log=False,
        )

    def setup(self, stage: str) -> None:
        """Lists the files; every rank does."""
        train, self.val, self.test = (
            FolderImages(self.data_dir, split) for split in ("train", "val", "test")
        )
        steps = self.trainer.max_steps if self.trainer is not None else -1
        num_samples = steps * self.data_sampler.global_batch_size if steps > 0 else len(train)
        shifted = ShiftImages(train, self.shift, self.seed)
        self.train = MultiEpochDatasetResampler(shifted, None, num_samples, seed=self.seed)

    def train_dataloader(self) -> DataLoader:
        """Training images, epoch after epoch."""
        return DataLoader(self.train, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        """Validation images, in order."""
        return DataLoader(self.val, num_workers=self.num_workers)

    def predict_dataloader(self) -> DataLoader:
        """Test images, in order."""
        return DataLoader(self.test, num_workers=self.num_workers)
