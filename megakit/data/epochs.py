"""Provides datasets with epochs for Megatron, whose sampler has no epochs.

Megatron's sampler reads the samples 0, 1, 2, ... up to the end of training. The classes here map
these indices to pairs of epoch and sample, with another shuffled order in each epoch. A dataset
that is indexed by such pairs can apply random effects that differ between epochs. The effects are
equal for equal pairs, on every rank and after every restart.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Dataset, default_collate

from megakit.data.batches import each, fetch_batch, fetch_samples, is_current
from megakit.data.indices import EpochIndex, IntArray, as_natural, check_index, check_indices
from megakit.data.permutation import permute

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U_co = TypeVar("U_co", covariant=True)


class SizedDataset(Protocol[T_co]):
    """A dataset of known length that is indexed by integers."""

    def __getitem__(self, index: int) -> T_co: ...

    def __len__(self) -> int: ...


class MultiEpochDataset(Protocol[T_co]):
    """A dataset of known length that is indexed by `EpochIndex`.

    Equal EpochIndex must always give equal samples. All ranks of a model replica read the samples
    themselves; if the samples differ, training is wrong without an error.
    """

    def __getitem__(self, index: EpochIndex[int]) -> T_co: ...

    def __len__(self) -> int: ...


@dataclass
class MultiEpochDatasetResampler(Dataset[T_co]):
    """Several epochs of a dataset as one long dataset, each epoch shuffled differently.

    Set `num_epochs` or `num_samples`; without both, the length is one epoch. Each epoch contains
    every sample exactly once; `num_samples` may end within the last epoch. Uses 8 bytes of memory
    per epoch, and a constant amount besides.

    Raises:
        ValueError: If the dataset is empty, both numbers are given, the number is below 1, or the
            seed is negative.
        TypeError: If a number is not an integer.
    """

    dataset: MultiEpochDataset[T_co]
    """The dataset to draw from, indexed by EpochIndex."""

    num_epochs: int | None = None
    """Number of epochs; set by the constructor if not given."""

    num_samples: int | None = None
    """Number of samples over all epochs; set by the constructor if not given."""

    shuffle: bool = True
    """Whether to shuffle each epoch; if False, all epochs have the order of the dataset."""

    seed: int = 42
    """Seed of the orders; any integer that is not negative."""

    def __post_init__(self) -> None:
        length = len(self.dataset)
        if length < 1:
            raise ValueError("The dataset is empty: there is nothing to draw from.")
        if self.num_samples is None:
            self.num_samples = length * (1 if self.num_epochs is None else self.num_epochs)
        elif self.num_epochs is not None:
            raise ValueError(
                "Only one of num_epochs and num_samples should be provided, got both: "
                f"{self.num_epochs} and {self.num_samples}."
            )
        self.num_samples = as_natural(self.num_samples, least=1)
        self.num_epochs = -(-self.num_samples // length)
        rng = np.random.default_rng(as_natural(self.seed))
        self.epoch_seeds = rng.integers(0, np.iinfo(np.int32).max, size=self.num_epochs)

    def __len__(self) -> int:
        assert self.num_samples is not None
        return self.num_samples

    def __getitem__(self, index: int) -> T_co:
        epoch, idx = divmod(check_index(index, len(self)), len(self.dataset))
        if self.shuffle:
            idx = permute(idx, len(self.dataset), self.epoch_seeds[epoch])
        return self.dataset[EpochIndex(epoch, idx)]

    def get_batch(self, indices: ArrayLike) -> Any:
        """Return the collated batch at these indices, integers of shape (B,)."""
        length = len(self.dataset)
        epochs, idx = np.divmod(check_indices(indices, len(self)), length)
        if self.shuffle:
            for epoch in np.unique(epochs):  # the epochs have different seeds
                is_in = epochs == epoch
                idx[is_in] = permute(idx[is_in], length, self.epoch_seeds[epoch])
        return fetch_batch(self.dataset, EpochIndex(epochs, idx))


@dataclass
class MultiEpochDatasetWrapper(Dataset[U_co], Generic[T, U_co], ABC):
    """Wraps a dataset indexed by integers in one indexed by `EpochIndex`.

    The wrapped dataset must return equal samples for equal indices. Random effects belong in
    `apply_transform`, which must return equal results for equal samples and EpochIndex; see
    `megakit.data.random_effects`.
    """

    dataset: SizedDataset[T]
    """The wrapped dataset, indexed by integers."""

    @abstractmethod
    def apply_transform(self, sample: T, index: EpochIndex[int]) -> U_co:
        """Return the sample with this epoch's random effects."""

    def apply_transform_batch(self, batch: Any, index: EpochIndex[IntArray]) -> Any:
        """Apply the transform to a collated batch; optional, and faster if written with arrays.

        The result must equal the collated transformed samples. Without this method, or in a
        subclass that overrides only `apply_transform`, samples are transformed one by one.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: EpochIndex[int]) -> U_co:
        return self.apply_transform(self.dataset[index.idx], index)

    def get_batch(self, indices: EpochIndex[IntArray]) -> Any:
        """Return the collated batch at these indices, two int64 fields of shape (B,)."""
        if is_current(type(self), "apply_transform_batch", "apply_transform"):
            return self.apply_transform_batch(fetch_batch(self.dataset, indices.idx), indices)
        samples = fetch_samples(self.dataset, indices.idx)
        pairs = cast(list[EpochIndex[int]], each(indices))
        return default_collate(list(map(self.apply_transform, samples, pairs)))


class BatchedMultiEpochDatasetWrapper(MultiEpochDatasetWrapper[T, U_co]):
    """A wrapper with a transform for batches only; it transforms a sample as a batch of one.

    Use it for random effects on tensors, with `uniform` or `bernoulli`. Numbers in a sample become
    tensors without dimensions.
    """

    @abstractmethod
    def apply_transform_batch(self, batch: Any, index: EpochIndex[IntArray]) -> Any:
        """Return the batch with its random effects; `index` has two int64 fields (B,)."""

    def apply_transform(self, sample: T, index: EpochIndex[int]) -> U_co:
        """Transform a sample as a batch of one."""
        place = EpochIndex(np.array([index.epoch]), np.array([index.idx]))
        return cast(U_co, _first(self.apply_transform_batch(default_collate([sample]), place)))


def _first(batch: Any) -> Any:
    """Return the first sample of a collated batch."""
    if isinstance(batch, dict):
        return {key: _first(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and not (batch and isinstance(batch[0], str | bytes)):
        return type(batch)(map(_first, batch))
    return batch[0]


class IdentityMultiEpochDatasetWrapper(MultiEpochDatasetWrapper[T, T]):
    """A wrapper without a transform: the samples are equal in every epoch."""

    def apply_transform(self, sample: T, index: EpochIndex[int]) -> T:
        """Return the sample unchanged."""
        return sample

    def apply_transform_batch(self, batch: Any, index: EpochIndex[IntArray]) -> Any:
        """Return the batch unchanged."""
        return batch
