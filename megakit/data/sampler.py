"""Divides the samples of each step among the ranks, and pads the last batch of an evaluation."""

from collections.abc import Callable, Iterator

import numpy as np

from megakit.data.indices import IntArray

PADDING = -1


class GlobalBatchSampler:
    """Divides the samples 0, 1, 2, ... into one rank's micro batches, as Megatron's samplers do.

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
        ValueError: The dataset has less than one global batch, or the batch sizes do not fit.
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
        if num_samples < (1 if pad else global_batch_size):
            raise ValueError(
                f"a dataset of {num_samples} samples is smaller than a batch of "
                f"{global_batch_size}. MultiEpochDatasetResampler makes it as long as the training."
            )
        self.slice_size = micro_batch_size * num_ranks
        if global_batch_size % self.slice_size:
            raise ValueError(
                f"a global batch of {global_batch_size} samples is no multiple of {num_ranks} data-"
                f"parallel ranks with micro batches of {micro_batch_size}. Use another size."
            )
        self.num_samples, self.global_batch_size = num_samples, global_batch_size
        self.num_batches = (num_samples + pad * (global_batch_size - 1)) // global_batch_size
        self.own = np.arange(rank * micro_batch_size, (rank + 1) * micro_batch_size)
        self.start = start

    def padding_weight(self) -> float:
        """Returns the weight of a sample by which padded batches have the mean of the samples."""
        return len(self) * self.slice_size / self.num_samples

    def __len__(self) -> int:
        return self.num_batches * self.global_batch_size // self.slice_size

    def __iter__(self) -> Iterator[IntArray]:
        end, size = self.num_batches * self.global_batch_size, self.global_batch_size
        for begin in range(self.start() % end, end - size + 1, size):
            for place in range(begin, begin + size, self.slice_size):
                indices = self.own + place
                yield np.where(indices < self.num_samples, indices, PADDING)
