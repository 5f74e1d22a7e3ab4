"""Epochs for Megatron, which itself knows only one long row of samples.

Megatron's sampler asks for samples 0, 1, 2, ... up to the end of training. Here the row is made of
epochs, each shuffled anew, and each sample learns which epoch it is drawn for, so that random
effects can differ between epochs and still be the same for the same index, on every rank and after
every restart.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
from torch.utils.data import Dataset, default_collate

from megakit.data.batches import fetch_batch, fetch_samples, is_current
from megakit.data.indices import (
    EpochIndex,
    IntArray,
    Located,
    all_below,
    as_indices,
    as_int,
    check_epoch_index,
    check_epoch_indices,
    check_index,
    check_indices,
)
from megakit.data.permutation import inverse_permute, permute

__all__ = [
    "EpochIndex",
    "SizedDataset",
    "MultiEpochDataset",
    "MultiEpochDatasetResampler",
    "MultiEpochDatasetWrapper",
    "BatchedMultiEpochDatasetWrapper",
    "IdentityMultiEpochDatasetWrapper",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U_co = TypeVar("U_co", covariant=True)

# Samples whose place is worked out ahead when batches are read in order: numpy takes nearly as long
# for 128 of them as for thousands. 256 KiB in each process.
_AHEAD = 16384


class SizedDataset(Protocol[T_co]):
    """A dataset of known length that is indexed by integers."""

    def __getitem__(self, index: int) -> T_co: ...

    def __len__(self) -> int: ...


class MultiEpochDataset(Protocol[T_co]):
    """A dataset of known length that is indexed by `EpochIndex`.

    The same EpochIndex must always give the same sample: model-parallel ranks each read it for
    themselves, and go wrong without a word where they read different things.
    """

    def __getitem__(self, index: EpochIndex[int]) -> T_co: ...

    def __len__(self) -> int: ...


@dataclass
class MultiEpochDatasetResampler(Dataset[T_co]):
    """Several epochs of a dataset as one long dataset, each epoch in an order of its own.

    Give `num_epochs` or `num_samples`; with neither it is one epoch. Within an epoch every sample
    comes exactly once; the last epoch is cut short if `num_samples` asks for it. Takes O(1) memory
    but for 8 bytes per epoch.

    Raises:
        ValueError: If the dataset is empty, both numbers are given, the number is below 1, or the
            seed is negative.
        TypeError: If a number is not an integer.
    """

    dataset: MultiEpochDataset[T_co]
    """What to draw from; indexed by EpochIndex."""

    num_epochs: int | None = None
    """How often each sample is drawn; after construction also set if num_samples was given."""

    num_samples: int | None = None
    """How many samples are drawn in all; after construction also set if num_epochs was given."""

    shuffle: bool = True
    """Whether each epoch has an order of its own, or that of the dataset."""

    seed: int = 42
    """Any integer that is not negative; decides the orders."""

    def __post_init__(self) -> None:
        if self.num_epochs is not None and self.num_samples is not None:
            raise ValueError(
                "Only one of num_epochs and num_samples should be provided, got both: "
                f"{self.num_epochs} and {self.num_samples}."
            )
        self._epoch_length = length = len(self.dataset)
        if length < 1:
            raise ValueError("The dataset is empty: there is nothing to draw from.")
        if self.num_samples is not None:
            self.num_samples = as_int(self.num_samples, "num_samples")
            if self.num_samples < 1:
                raise ValueError(
                    f"num_samples={self.num_samples}, but num_epochs must be at least 1 and so "
                    "must num_samples."
                )
            self.num_epochs = -(-self.num_samples // length)
        else:
            num_epochs = 1 if self.num_epochs is None else self.num_epochs
            self.num_epochs = as_int(num_epochs, "num_epochs")
            if self.num_epochs < 1:
                raise ValueError(f"num_epochs must be at least 1, got {self.num_epochs}.")
            self.num_samples = length * self.num_epochs
        self.seed = as_int(self.seed, "The seed")
        if self.seed < 0:
            raise ValueError(f"The seed must not be negative, got {self.seed}.")

        rng = np.random.default_rng(self.seed)
        self.epoch_seeds = rng.integers(0, np.iinfo(np.int32).max, size=self.num_epochs)
        nothing = np.empty(0, np.int64)
        # A first index, and where it and the next ones are.
        self._ahead = 0, self._located(nothing, nothing)

    def __len__(self) -> int:
        assert self.num_samples is not None
        return self.num_samples

    def __iter__(self) -> Iterator[T_co]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> T_co:
        return self.dataset[self._global_index_to_permuted_local_index(index)]

    def __getitems__(self, indices: list[int]) -> list[T_co]:
        """Return the samples at these indices, as PyTorch's loader asks for them."""
        return fetch_samples(self.dataset, self._locate(indices))

    def get_batch(self, indices: IntArray) -> Any:
        """Return the collated batch at these indices, int64 of shape (B,)."""
        return fetch_batch(self.dataset, self._locate(indices))

    def positions_of(self, idx: int) -> IntArray:
        """Return the indices at which sample `idx` of the dataset is drawn, ascending.

        It answers what a run that went wrong asks first: when was this sample seen?

        Returns:
            int64, one for each epoch but a last one that was cut short before the sample.
        """
        idx = check_index(idx, self._epoch_length)
        within = inverse_permute(idx, self._epoch_length, self.epoch_seeds) if self.shuffle else idx
        positions: IntArray = np.arange(self.epoch_seeds.size) * self._epoch_length + within
        return positions[positions < len(self)]

    def _global_index_to_permuted_local_index(self, index: int) -> EpochIndex[int]:
        epoch, idx = divmod(check_index(index, len(self)), self._epoch_length)
        if self.shuffle:
            idx = permute(idx, self._epoch_length, int(self.epoch_seeds[epoch]))
        return EpochIndex(epoch, idx)

    def _locate(self, indices: Any) -> Located:
        """Map the indices of a batch to epochs and indices, each of shape (B,)."""
        indices = as_indices(indices)
        start, ahead = self._ahead
        at = indices - start
        if not all_below(at, ahead.idx.size):
            check_indices(indices, len(self))
            start, last = int(indices.min()), int(indices.max())
            if not self.shuffle or last - start >= min(2 * indices.size, _AHEAD):
                return self._locate_directly(indices)  # read in no order: nothing to prepare
            ahead = self._locate_directly(np.arange(start, min(start + _AHEAD, len(self))))
            self._ahead = start, ahead
            at = indices - start
        return self._located(ahead.epoch[at], ahead.idx[at])

    def _locate_directly(self, indices: IntArray) -> Located:
        epochs, idxs = np.divmod(indices, self._epoch_length)
        if self.shuffle:
            one_epoch = epochs.min() == epochs.max()  # one seed for all is faster
            seeds = int(self.epoch_seeds[epochs[0]]) if one_epoch else self.epoch_seeds[epochs]
            idxs = permute(idxs, self._epoch_length, seeds)
        return self._located(epochs, idxs)

    def _located(self, epochs: IntArray, idxs: IntArray) -> Located:
        located = Located(epochs, idxs)
        located.length = self._epoch_length
        return located


@dataclass
class MultiEpochDatasetWrapper(Dataset[U_co], Generic[T, U_co], ABC):
    """Makes a dataset indexed by integers into one indexed by `EpochIndex`.

    The dataset inside must give the same sample for the same index. Random effects go into
    `apply_transform`, which must give the same result for the same sample and EpochIndex; see
    `megakit.data.random_effects`.
    """

    dataset: SizedDataset[T]
    """What gives the samples; indexed by integers."""

    @abstractmethod
    def apply_transform(self, sample: T, index: EpochIndex[int]) -> U_co:
        """Turn a sample into what is trained on in this epoch."""
        raise NotImplementedError

    def apply_transform_batch(self, batch: Any, index: EpochIndex[IntArray]) -> Any:
        """Do the same to a collated batch; optional, and quicker where written with arrays.

        It must give what collating the transformed samples would. Without it, or in a subclass that
        changes `apply_transform` alone, batches are transformed sample by sample.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: EpochIndex[int]) -> U_co:
        index = check_epoch_index(index, len(self))
        return self.apply_transform(self.dataset[index.idx], index)

    def __getitems__(self, indices: Any) -> list[U_co]:
        """Return the samples at these EpochIndex, as PyTorch's loader asks for them."""
        checked = [check_epoch_index(index, len(self)) for index in indices]
        samples = fetch_samples(self.dataset, np.array([index.idx for index in checked], np.int64))
        return list(map(self.apply_transform, samples, checked))

    def get_batch(self, indices: EpochIndex[IntArray]) -> Any:
        """Return the collated batch at these indices, two int64 fields of shape (B,)."""
        indices = check_epoch_indices(indices, len(self))
        if is_current(type(self), "apply_transform_batch", "apply_transform"):
            return self.apply_transform_batch(fetch_batch(self.dataset, indices.idx), indices)
        return default_collate(fetch_samples(self, indices))


class BatchedMultiEpochDatasetWrapper(MultiEpochDatasetWrapper[T, U_co]):
    """One whose transform is written for batches alone: a sample is transformed as a batch of one.

    For random effects on tensors, by `uniform`, that is the whole work. Numbers in a sample come
    out as tensors without dimensions.
    """

    @abstractmethod
    def apply_transform_batch(self, batch: Any, index: EpochIndex[IntArray]) -> Any:
        """Turn a collated batch into what is trained on; `index` has two int64 fields (B,)."""
        raise NotImplementedError

    def apply_transform(self, sample: T, index: EpochIndex[int]) -> U_co:
        """Return the sample that is transformed in a batch of its own."""
        place = EpochIndex(np.array([index.epoch]), np.array([index.idx]))
        return cast(U_co, _first(self.apply_transform_batch(default_collate([sample]), place)))


def _first(batch: Any) -> Any:
    """Return the first sample of a collated batch."""
    if isinstance(batch, dict):
        return {key: _first(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_first, batch))
    if isinstance(batch, list | tuple) and not (batch and isinstance(batch[0], str | bytes)):
        return type(batch)(map(_first, batch))
    return batch[0]


class IdentityMultiEpochDatasetWrapper(MultiEpochDatasetWrapper[T, T]):
    """The same samples in every epoch: no transform at all."""

    def apply_transform(self, sample: T, index: EpochIndex[int]) -> T:
        """Return the sample as it is."""
        return sample

    def apply_transform_batch(self, batch: Any, index: EpochIndex[IntArray]) -> Any:
        """Return the batch as it is."""
        return batch
