"""Images from folders as NeMo wants them; the model is the vision transformer of examples/vit."""

from pathlib import Path

from torch.utils.data import DataLoader

from examples.own_images.image_dataset import FolderImages
from examples.vit.vit_components import ShiftImages
from megakit.data import ExactDataSampler, MegatronDataModule, MultiEpochDatasetResampler


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
