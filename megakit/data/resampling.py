"""Samples with replacement; each access takes O(1) time and memory, in any order."""

from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from megakit.data.batches import fetch_batch, fetch_samples
from megakit.data.epochs import SizedDataset
from megakit.data.hashing import GOLDEN, key_of, mix64, stream
from megakit.data.indices import Int, IntArray, as_int, as_seed, check_index, check_indices

T_co = TypeVar("T_co", covariant=True)


class PRNGResampleDataset(Dataset[T_co], Generic[T_co]):
    """Draws each sample from the whole dataset, independently of all other draws.

    About 37% of the samples are not drawn in as many draws as the dataset has samples. Prefer
    `MultiEpochDatasetResampler`, which draws all samples at the same cost. Draw number i is a hash
    of seed and i (`megakit.data.hashing`). So the draw is equal on all ranks and platforms, after
    every restart, and in any order of reading. The hash is converted to an index without bias, as
    in Daniel Lemire, "Fast Random Integer Generation in an Interval", ACM TOMACS 29(1), 2019; a
    rejected hash is hashed again.

    Args:
        dataset: The dataset to draw from, indexed by integers.
        seed: Seed of the draws, any integer that is not negative.
        num_samples: Number of draws; by default the dataset's length.

    Raises:
        ValueError: If the dataset is empty, `num_samples` is below 1, or the seed is negative.
        TypeError: If `seed`, `num_samples` or an index is not an integer.
    """

    def __init__(
        self, dataset: SizedDataset[T_co], seed: Int = 42, num_samples: Int | None = None
    ) -> None:
        self.dataset = dataset
        self.seed = as_seed(seed)
        self._key = key_of(self.seed)
        self._dataset_length = len(dataset)
        if self._dataset_length < 1:
            raise ValueError("The dataset is empty: there is nothing to draw from.")
        given = self._dataset_length if num_samples is None else num_samples
        self.num_samples = as_int(given, "num_samples")
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {self.num_samples}.")

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> T_co:
        number = check_index(index, self.num_samples)
        return self.dataset[self._draw([number]).item()]

    def __getitems__(self, indices: list[int]) -> list[T_co]:
        """Return the samples at these indices; PyTorch's loader calls this."""
        return fetch_samples(self.dataset, self._draw(indices))

    def get_batch(self, indices: IntArray) -> Any:
        """Return the collated batch at these indices, int64 of shape (B,)."""
        return fetch_batch(self.dataset, self._draw(indices))

    def _draw(self, indices: ArrayLike) -> IntArray:
        checked = check_indices(indices, self.num_samples)
        return draw(self._key, checked.astype(np.uint64), self._dataset_length)


def draw(key: int, counters: NDArray[np.uint64], length: int) -> IntArray:
    """Return the draws number `counters`, shape (B,), from [0, length), as int64 (B,)."""
    z = stream(key, counters)
    too_low = np.uint64(2**64 % length)
    rejected = np.flatnonzero(z * np.uint64(length) < too_low)
    while rejected.size:
        again = mix64(z[rejected] + np.uint64(GOLDEN))
        z[rejected] = again
        rejected = rejected[again * np.uint64(length) < too_low]
    return _high_word(z, length).astype(np.int64)


def _high_word(x: NDArray[np.uint64], y: int) -> NDArray[np.uint64]:
    """Return x * y >> 64 from four products of 32-bit halves; no sum here exceeds 64 bits."""
    low32, half = np.uint64(2**32 - 1), np.uint64(32)
    x_low, x_high = x & low32, x >> half
    y_low, y_high = np.uint64(y & 2**32 - 1), np.uint64(y >> 32)
    middle = x_high * y_low + (x_low * y_low >> half)
    carry = x_low * y_high + (middle & low32)
    high: NDArray[np.uint64] = x_high * y_high + (middle >> half) + (carry >> half)
    return high
