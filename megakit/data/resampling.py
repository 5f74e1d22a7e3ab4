"""Samples with replacement; each access takes O(1) time and memory, in any order."""

from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Dataset

from megakit.data.batches import fetch_batch
from megakit.data.epochs import SizedDataset
from megakit.data.indices import Int, IntArray, as_natural, check_indices
from megakit.data.random_effects import GOLDEN, key_of, mix64

T_co = TypeVar("T_co", covariant=True)


class PRNGResampleDataset(Dataset[T_co], Generic[T_co]):
    """Draws each sample from the whole dataset, independently of all other draws.

    About 37% of the samples are not drawn in as many draws as the dataset has samples. Prefer
    `MultiEpochDatasetResampler`, which draws all samples at the same cost. Draw number i is a hash
    of seed and i. So the draw is equal on all ranks and platforms, after every restart, and in any
    order of reading.
    """

    def __init__(
        self, dataset: SizedDataset[T_co], seed: Int = 42, num_samples: Int | None = None
    ) -> None:
        self.dataset, self.seed = dataset, as_natural(seed)
        if len(dataset) < 1:
            raise ValueError("The dataset is empty: there is nothing to draw from.")
        self.num_samples = as_natural(len(dataset) if num_samples is None else num_samples, least=1)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> T_co:
        return self.dataset[self._draw([index]).item()]

    def get_batch(self, indices: IntArray) -> Any:
        """Return the collated batch at these indices, int64 of shape (B,)."""
        return fetch_batch(self.dataset, self._draw(indices))

    def _draw(self, indices: ArrayLike) -> IntArray:
        """Convert hashes to indices without bias.

        Source: Daniel Lemire, "Fast Random Integer Generation in an Interval", ACM TOMACS 29(1),
        2019. The index is the high word of hash times length. Hashes whose low word is too low are
        hashed again.
        """
        checked, length = check_indices(indices, self.num_samples), np.uint64(len(self.dataset))
        x = mix64(
            np.uint64(key_of(self.seed)) + (checked.astype(np.uint64) + np.uint64(1)) * GOLDEN
        )
        too_low = np.uint64(2**64 % len(self.dataset))
        while (rejected := np.flatnonzero(x * length < too_low)).size:
            x[rejected] = mix64(x[rejected] + GOLDEN)
        half, low = np.uint64(32), np.uint64(2**32 - 1)  # numpy has no product of 128 bits
        middle = (x >> half) * (length & low) + ((x & low) * (length & low) >> half)
        carry = (x & low) * (length >> half) + (middle & low)
        high = (x >> half) * (length >> half) + (middle >> half) + (carry >> half)
        return high.astype(np.int64)
