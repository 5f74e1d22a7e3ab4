"""Blends several datasets in proportion to weights; each access takes O(1) time and memory."""

import numbers
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.utils.data import Dataset

from megakit.data.assignment import assign, whole_weights
from megakit.data.batches import fetch_batch, fetch_samples
from megakit.data.device import on_device
from megakit.data.epochs import MultiEpochDataset, MultiEpochDatasetWrapper, SizedDataset
from megakit.data.indices import (
    EpochIndex,
    Int,
    IntArray,
    as_int,
    as_seed,
    check_index,
    check_indices,
)
from megakit.data.permutation import permute
from megakit.data.random_effects import key_of, stream


class BlendedDataset(Dataset[Any]):
    """Draws from several datasets in proportion to weights, in epochs of each dataset.

    A period of at most 10,000 slots assigns a member to each slot, and repeats without end. So the
    first n samples contain each member's share of n, with a difference below 1 (`assign`). A member
    gives each of its samples once before its next epoch starts. Each epoch of each member has its
    own order. Sample i is a function of the members, the weights, the seed and i alone. So it is
    equal on all ranks, after every restart, and in any order of reading. There is no array of
    samples or of epochs.

    The shares are exact if they are fractions with a common denominator of at most 10,000.
    Otherwise they are the nearest such shares (`whole_weights`).

    A member is indexed by `EpochIndex` if its class derives from `MultiEpochDatasetWrapper` or
    `MultiEpochDataset`, or if it annotates the index of `__getitem__` as an `EpochIndex`. Every
    other member is indexed by integers.

    Args:
        members: Pairs of a dataset and its weight, a positive finite number of any scale.
        num_samples: Length of the blend; by default, the blend ends before a member gives a sample
            for the second time.
        seed: Seed of the orders, any integer that is not negative.
        shuffle: Whether to shuffle each epoch; if False, all epochs have the order of the dataset.

    Attributes:
        datasets: The members' datasets.
        counts: The number of slots of each member in a period; int64 of shape (M,).

    Raises:
        ValueError: If there are no members, a dataset is empty, a weight is not positive and finite
            or is less than 1/10,000 of all weights, `num_samples` is below 1, or the seed is
            negative.
        TypeError: If a member is not a pair, a weight is not a number, or `seed`, `num_samples` or
            an index is not an integer.
    """

    def __init__(
        self,
        members: Iterable[tuple[SizedDataset[Any] | MultiEpochDataset[Any], float]],
        num_samples: Int | None = None,
        seed: Int = 42,
        shuffle: bool = True,
    ) -> None:
        members = list(members)
        _check_members(members)
        self.datasets: tuple[Any, ...] = tuple(dataset for dataset, _ in members)
        self.counts = whole_weights([weight for _, weight in members])
        self.seed, self.shuffle = as_seed(seed), shuffle
        self._lengths = [len(dataset) for dataset in self.datasets]
        numbers = np.arange(len(self.datasets), dtype=np.uint64)
        self._keys: list[int] = stream(key_of(self.seed), numbers).tolist()
        # For each slot of a period: its member, and the member's number of slots before it.
        self._members = assign(self.counts.tolist()).astype(np.int16)
        self._before = np.empty_like(self._members)
        for member, count in enumerate(self.counts):
            self._before[self._members == member] = np.arange(count)
        given = self._exhausted_after() if num_samples is None else num_samples
        self.num_samples = as_int(given, "num_samples")
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {self.num_samples}.")

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        member, place = self.locate(index)
        dataset = self.datasets[member]
        return dataset[place if is_indexed_by_epoch(dataset) else place.idx]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples at these indices; PyTorch's loader calls this."""
        samples: list[Any] = [None] * len(indices)
        for member, positions, inner in self._split(indices):
            fetched = fetch_samples(self.datasets[member], inner)
            for position, sample in zip(positions.tolist(), fetched, strict=True):
                samples[position] = sample
        return samples

    def get_batch(self, indices: IntArray) -> Any:
        """Return the collated batch at these indices, int64 of shape (B,).

        Raises:
            ValueError: If there are no indices, or the members' samples differ in keys, shapes or
                dtypes.
        """
        parts = self._split(indices)
        if not parts:
            raise ValueError("A batch needs at least one index, got none.")
        batches = {member: fetch_batch(self.datasets[member], inner) for member, _, inner in parts}
        if len(parts) == 1:
            return batches.popitem()[1]
        return _merge(batches, np.argsort(np.concatenate([positions for _, positions, _ in parts])))

    def locate(self, index: int) -> tuple[int, EpochIndex[int]]:
        """Return the member that gives a sample, and the sample's epoch and index there."""
        period, slot = divmod(check_index(index, self.num_samples), len(self._members))
        member = int(self._members[slot])
        number = period * int(self.counts[member]) + int(self._before[slot])
        epoch, idx = divmod(number, self._lengths[member])
        if self.shuffle:
            seed = stream(self._keys[member], np.array([epoch], np.uint64)).item()
            idx = permute(idx, self._lengths[member], seed)
        return member, EpochIndex(epoch, idx)

    def _split(
        self, indices: ArrayLike
    ) -> list[tuple[int, IntArray, IntArray | EpochIndex[IntArray]]]:
        """List each member in a batch, its positions in the batch, and its own indices."""
        checked = check_indices(indices, self.num_samples)
        periods, slots = np.divmod(checked, len(self._members))
        members = self._members[slots]
        numbers = periods * self.counts[members] + self._before[slots]
        parts = []
        for member in np.unique(members).tolist():
            positions = np.flatnonzero(members == member)
            parts.append((member, positions, self._indices_of(member, numbers[positions])))
        return parts

    def _indices_of(self, member: int, numbers: IntArray) -> IntArray | EpochIndex[IntArray]:
        """Map the running numbers of a member's samples to the member's indices."""
        length, key = self._lengths[member], self._keys[member]
        epochs, idxs = np.divmod(numbers, length)
        if self.shuffle:
            if epochs.min() == epochs.max():  # `permute` is faster with a single seed
                idxs = permute(idxs, length, stream(key, epochs[:1].astype(np.uint64)).item())
            else:
                idxs = permute(idxs, length, stream(key, epochs.astype(np.uint64)))
        return EpochIndex(epochs, idxs) if is_indexed_by_epoch(self.datasets[member]) else idxs

    def _exhausted_after(self) -> int:
        """Return the number of samples before the first one from a member's second epoch."""
        ends = []
        for member, length in enumerate(self._lengths):
            period, number = divmod(length, int(self.counts[member]))
            slot = int(np.flatnonzero(self._members == member)[number])
            ends.append(period * len(self._members) + slot)
        return min(ends)


def is_indexed_by_epoch(dataset: object) -> bool:
    """Return whether a member of a blend is indexed by `EpochIndex`, as its class states.

    The class extends `MultiEpochDatasetWrapper` or `MultiEpochDataset`, or it annotates the index
    of `__getitem__` as an `EpochIndex`.
    """
    bases = type(dataset).__mro__
    if MultiEpochDatasetWrapper in bases or MultiEpochDataset in bases:
        return True
    annotations = getattr(getattr(type(dataset), "__getitem__", None), "__annotations__", {})
    return any("EpochIndex" in str(one) for name, one in annotations.items() if name != "return")


def _check_members(members: Sequence[Any]) -> None:
    if not members:
        raise ValueError("A blend needs at least one pair of a dataset and its weight, got none.")
    for number, member in enumerate(members):
        if not isinstance(member, tuple | list) or len(member) != 2:
            raise TypeError(
                f"Member {number} must be a pair (dataset, weight), got a {type(member).__name__}."
            )
        dataset, weight = member
        _check_weight(number, weight)
        if len(dataset) < 1:
            raise ValueError(f"The dataset of member {number} is empty: leave out the member.")


def _check_weight(number: int, weight: Any) -> None:
    is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
    if not is_number:
        raise TypeError(
            f"The weight of member {number} must be a number, got {weight!r} of type "
            f"{type(weight).__name__}."
        )
    if not 0 < weight <= sys.float_info.max or float(weight) == 0:
        raise ValueError(
            f"The weight of member {number} must be positive and finite, got {weight}. To use no "
            "sample of a dataset, leave out the dataset."
        )


def _merge(parts: dict[int, Any], order: IntArray, path: str = "batch") -> Any:
    """Merge the members' collated batches.

    Args:
        parts: The batches by member.
        order: For each sample of the result, its position in the concatenated batches; (B,).
        path: The place in the batch, for messages.
    """
    (number, first), *others = parts.items()
    for other, part in others:
        if _form(part) != _form(first):
            raise ValueError(
                f"Members {number} and {other} of the blend give different samples. {path} is "
                f"{_form(first)} and {_form(part)}. All members must give the same keys, shapes "
                "and dtypes. Wrap a member to convert its samples."
            )

    def merged(key: Any) -> Any:
        inner = {number: part[key] for number, part in parts.items()}
        return _merge(inner, order, f"{path}[{key!r}]")

    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts.values())).index_select(0, on_device(order, like=first))
    if isinstance(first, dict):
        return {key: merged(key) for key in first}
    if _form(first) == "strings":
        strings = [string for part in parts.values() for string in part]
        return type(first)(strings[position] for position in order.tolist())
    fields = map(merged, range(len(first)))
    return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)


def _form(batch: Any) -> str:
    """Describe what all members' batches must have in common, without the entries inside."""
    if isinstance(batch, torch.Tensor):
        return f"{batch.dtype} of shape {['B', *batch.shape[1:]]}".replace("'", "")
    if isinstance(batch, dict):
        return f"a dict with the keys {sorted(batch, key=str)}"
    if not isinstance(batch, list | tuple):
        raise TypeError(f"A blend cannot merge batches of {type(batch).__name__}.")
    if batch and isinstance(batch[0], str | bytes):
        return "strings"
    return f"a {type(batch).__name__} of {len(batch)}"
