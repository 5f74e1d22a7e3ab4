"""Selects the samples of each rank, and their order."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from numpy.typing import NDArray
from torch.utils.data import DataLoader, RandomSampler

from megakit.data.loader import make_loader

PADDING = -1


class GlobalBatchSampler:
    """Divides the samples 0, 1, 2, ... into global batches, and yields one rank's micro batches.

    Global batch n has the samples `n * global` up to `(n + 1) * global`, for any number of ranks
    and any micro batch size. Slice m of a global batch has `micro * ranks` samples: the micro batch
    m of each data-parallel rank, in the order of the ranks.

    Args:
        num_samples: Length of the dataset.
        micro_batch_size: Samples per rank and forward pass.
        global_batch_size: Samples per step; a multiple of micro batch size times `num_ranks`.
        rank: Data-parallel rank.
        num_ranks: Data-parallel size.
        start: Returns the number of samples consumed so far; called at the start of each iteration.
            After a first pass over the dataset, this number exceeds the dataset's length.
        pad: Whether to fill an incomplete last global batch with `PADDING`, instead of dropping it.

    Yields:
        Arrays of `micro_batch_size` indices, int64.

    Raises:
        ValueError: If the batch sizes do not fit, or the dataset has less than one global batch.
    """

    def __init__(
        self,
        num_samples: int,
        micro_batch_size: int,
        global_batch_size: int,
        rank: int = 0,
        num_ranks: int = 1,
        start: Callable[[], int] = lambda: 0,
        pad: bool = False,
    ) -> None:
        slice_size = micro_batch_size * num_ranks
        if global_batch_size % slice_size:
            raise ValueError(
                f"global batch size {global_batch_size} is no multiple of micro batch size "
                f"{micro_batch_size} x {num_ranks} data-parallel ranks = {slice_size}."
            )
        padding = -num_samples % global_batch_size if pad else 0
        self.end = (num_samples + padding) // global_batch_size * global_batch_size
        if not self.end:
            raise ValueError(
                f"a dataset of {num_samples} samples is smaller than a batch of "
                f"{global_batch_size}. MultiEpochDatasetResampler makes it as long as the training."
            )
        self.num_samples, self.start = num_samples, start
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.slice_size, self.offset = slice_size, rank * micro_batch_size

    def __len__(self) -> int:
        """Count all micro batches from sample 0, as Lightning counts consumed batches, too."""
        return self.end // self.slice_size

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        size, micro = self.global_batch_size, self.micro_batch_size
        for first in range(self.start() % self.end, self.end - size + 1, size):
            for begin in range(first + self.offset, first + size, self.slice_size):
                indices = np.arange(begin, begin + micro)
                if indices[-1] >= self.num_samples:
                    indices[indices >= self.num_samples] = PADDING
                yield indices


class ExactDataSampler(MegatronDataSampler):
    """A data sampler for NeMo that reads every sample of an evaluation exactly once.

    NeMo's own sampler drops an incomplete last batch in validation. In prediction, its batches can
    have different sizes on different ranks, or be missing. This sampler pads the last global batch,
    so that all ranks have equally many batches of equal shape, and marks the padding in
    `batch["loss_mask"]`.
    """

    def transform_dataloader(self, dataloader: DataLoader, consumed_samples: int = 0) -> DataLoader:
        """Returns a loader with this rank's sampler; it fetches whole batches if possible.

        Raises:
            ValueError: If the loader shuffles, or has less than one global batch.
        """
        from megatron.core import parallel_state

        if isinstance(dataloader.sampler, RandomSampler):
            raise ValueError(
                "a DataLoader with shuffle=True: each rank would draw another order. Remove "
                "shuffle=True, and wrap the dataset in MultiEpochDatasetResampler."
            )
        mode = getattr(dataloader, "mode", "train")
        is_training = mode == "train"
        num_ranks = parallel_state.get_data_parallel_world_size()
        dataset: Any = dataloader.dataset
        num_samples = len(dataset)
        # The weights of the samples have to fit the number of samples that the trainer reads.
        part = "val" if mode == "validation" else mode
        limit = getattr(getattr(self, "trainer", None), f"limit_{part}_batches", None)
        if isinstance(limit, int) and limit and not is_training:
            num_samples = min(num_samples, limit * self.micro_batch_size * num_ranks)
        sampler = GlobalBatchSampler(
            num_samples,
            self.micro_batch_size,
            self.global_batch_size,
            rank=parallel_state.get_data_parallel_rank(),
            num_ranks=num_ranks,
            start=self._consumed_samples if is_training else lambda: 0,
            pad=not is_training,
        )
        return make_loader(dataloader, sampler, mark_padding=not is_training)

    def _consumed_samples(self) -> int:
        trainer = getattr(self, "trainer", None)
        steps = trainer.global_step - self.init_global_step if trainer is not None else 0
        return self.init_consumed_samples + steps * self.global_batch_size
