"""Defines the data module for images in folders; the model is that of `vit_components`."""

from pathlib import Path
from typing import Any

from examples.own_images.image_dataset import FolderImages
from examples.vit.random_effects import ShiftImages
from megakit.data import MegatronDataModule


class FolderDataModule(MegatronDataModule):
    """Loads the three splits; training images are shifted at random, differently in each epoch.

    Args:
        data_dir: Folder that contains the splits.
        micro_batch_size: Samples per rank and forward pass.
        global_batch_size: Samples per step over all ranks.
        shift: Largest shift, in pixels.
        options: Options of `MegatronDataModule`: `seed`, `num_workers`.
    """

    def __init__(
        self,
        data_dir: Path,
        micro_batch_size: int,
        global_batch_size: int,
        *,
        shift: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(micro_batch_size, global_batch_size, **options)
        self.data_dir, self.shift = data_dir, shift

    def setup(self, stage: str) -> None:
        """Lists the files; Lightning calls this on every rank."""
        train, self.val_set, self.test_set = (
            FolderImages(self.data_dir, split) for split in ("train", "val", "test")
        )
        self.train_set = self.resample(ShiftImages(train, self.shift, self.seed))
