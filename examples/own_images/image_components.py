"""Images from folders as NeMo wants them; the model is the vision transformer of examples/vit."""

from pathlib import Path
from typing import Any

from examples.own_images.image_dataset import FolderImages
from examples.vit.vit_components import ShiftImages
from megakit.data import MegatronDataModule


class FolderDataModule(MegatronDataModule):
    """The three splits; training images are shifted a little, in another way in each epoch.

    Args:
        data_dir: Folder of the splits.
        micro_batch_size: Samples per rank and forward pass.
        global_batch_size: Samples per step over all ranks.
        shift: Largest shift, in pixels.
        options: Those of `MegatronDataModule`: `seed`, `num_workers`.
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
        """Lists the files, on every rank."""
        train, self.val_set, self.test_set = (
            FolderImages(self.data_dir, split) for split in ("train", "val", "test")
        )
        self.train_set = self.resample(ShiftImages(train, self.shift, self.seed))
