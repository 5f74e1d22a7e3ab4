"""Blends several datasets in proportion to weights; each access takes O(1) time and memory."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from megakit.data.epochs import (
    IdentityMultiEpochDatasetWrapper,
    MultiEpochDataset,
    MultiEpochDatasetResampler,
    MultiEpochDatasetWrapper,
    SizedDataset,
)
from megakit.data.indices import Int, IntArray, as_natural, check_indices
from megakit.data.random_effects import key_of

SLOTS = 10_000


class BlendedDataset(Dataset[Any]):
    """Draws from several datasets in proportion to weights, in epochs of each dataset.

    A period of about 10,000 slots assigns a member to each slot, and repeats without end. A member
    gives each of its samples once before its next epoch starts, in another order. Sample i is a
    function of the members, the weights, the seed and i alone. So it is equal on all ranks, after
    every restart, and in any order of reading. `counts` has each member's slots in a period.

    Args:
        members: Pairs of a dataset and its weight, a positive number of any scale. A dataset that
            extends `MultiEpochDatasetWrapper` or `MultiEpochDataset` is indexed by `EpochIndex`,
            any other by integers. The samples consist of tensors and numbers.
        num_samples: Length of the blend; by default, about the first member's first epoch ends.
        seed: Seed of the orders, any integer that is not negative.
        shuffle: Whether to shuffle each epoch; if False, all epochs have the order of the dataset.
    """

    def __init__(
        self,
        members: Iterable[tuple[SizedDataset[Any] | MultiEpochDataset[Any], float]],
        num_samples: int | None = None,
        seed: Int = 42,
        shuffle: bool = True,
    ) -> None:
        datasets, weights = zip(*members, strict=True)
        self.counts = counts = np.rint(np.array(weights) / sum(weights) * SLOTS)
        if not (counts >= 1).all():
            raise ValueError(
                f"The weights {weights} of the blend: each has to be positive, and at least "
                f"1/{SLOTS} of their sum. Leave out a member, or increase its weight."
            )
        self.counts = counts = counts.astype(int)
        # The k-th of a member's slots has its place where k + 1/2 of its shares have passed.
        times = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        order = np.argsort(times, kind="stable")
        self._members = np.repeat(np.arange(len(counts)), counts)[order]
        #: For each slot, the number of the member's slots before it.
        self._before = np.concatenate([np.arange(count) for count in counts])[order]
        if num_samples is None:
            lengths = np.array([len(dataset) for dataset in datasets])
            num_samples = int((lengths / counts).min() * len(order))
        self.num_samples = as_natural(num_samples, least=1)
        num_periods = -(-self.num_samples // len(order))
        key = key_of(as_natural(seed))
        self.datasets = [
            MultiEpochDatasetResampler(
                _by_epoch(dataset), None, num_periods * int(count), shuffle, key + member
            )
            for member, (dataset, count) in enumerate(zip(datasets, counts, strict=True))
        ]

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        (member,), (number,) = self._locate([index])
        return self.datasets[member][number]

    def get_batch(self, indices: IntArray) -> Any:
        """Return the collated batch at these indices, int64 of shape (B,)."""
        members, numbers = self._locate(indices)
        parts = [
            self.datasets[member].get_batch(numbers[members == member])
            for member in np.unique(members)
        ]
        # The parts follow one another; `places` has each sample's place in them.
        places = torch.from_numpy(np.argsort(np.argsort(members, kind="stable")))
        return tree_map(lambda *tensors: torch.cat(tensors)[places], *parts)

    def _locate(self, indices: ArrayLike) -> tuple[IntArray, IntArray]:
        """Return each sample's member, and its number among the member's samples."""
        periods, slots = np.divmod(check_indices(indices, self.num_samples), len(self._members))
        members = self._members[slots]
        return members, periods * self.counts[members] + self._before[slots]


def _by_epoch(dataset: Any) -> MultiEpochDataset[Any]:
    is_by_epoch = {MultiEpochDatasetWrapper, MultiEpochDataset} & set(type(dataset).__mro__)
    return dataset if is_by_epoch else IdentityMultiEpochDatasetWrapper(dataset)
