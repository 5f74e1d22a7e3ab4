"""Blends several datasets in proportion to weights; each access takes O(1) time and memory."""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from megakit.data.batches import fetch_batch
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

MAX_SLOTS = 10_000


class BlendedDataset(Dataset[Any]):
    """Draws from several datasets in proportion to weights, in epochs of each dataset.

    A period of at most 10,000 slots assigns a member to each slot, and repeats without end. A
    member gives each of its samples once before its next epoch starts, in another order. Sample i
    is a function of the members, the weights, the seed and i alone. So it is equal on all ranks,
    after every restart, and in any order of reading. `counts` has each member's slots in a period.

    Args:
        members: Pairs of a dataset and its weight, a positive number of any scale.
        num_samples: Length of the blend; by default, the blend ends before a member gives a sample
            for the second time.
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
        self.datasets: tuple[Any, ...] = datasets
        self.seed, self.shuffle = as_seed(seed), shuffle
        self._lengths = [len(dataset) for dataset in datasets]
        if 0 in self._lengths:
            member = self._lengths.index(0)
            raise ValueError(f"The dataset of member {member} is empty: leave out the member.")
        self.counts = np.array(_count_slots(weights))
        # For each slot of a period: its member, and the member's number of slots before it.
        self._members, self._before = _assign(self.counts.tolist())
        numbers = np.arange(len(datasets), dtype=np.uint64)
        self._keys: list[int] = stream(key_of(self.seed), numbers).tolist()
        length = self._exhausted_after() if num_samples is None else num_samples
        self.num_samples = as_int(length, "num_samples")
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {self.num_samples}.")

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        member, place = self.locate(index)
        dataset = self.datasets[member]
        return dataset[place if is_indexed_by_epoch(dataset) else place.idx]

    def get_batch(self, indices: IntArray) -> Any:
        """Return the collated batch at these indices, int64 of shape (B,)."""
        periods, slots = np.divmod(check_indices(indices, self.num_samples), len(self._members))
        members = self._members[slots]
        numbers = periods * self.counts[members] + self._before[slots]
        parts = {
            member: self._fetch(member, numbers[members == member])
            for member in np.unique(members).tolist()
        }
        forms = {member: _form(part) for member, part in parts.items()}
        if any(form != forms[members[0]] for form in forms.values()):
            raise ValueError(
                f"The members of the blend give different samples: {forms}. All members must give "
                "the same keys, shapes and dtypes. Wrap a member to convert its samples."
            )
        return _merge(list(parts.values()), np.argsort(np.argsort(members, kind="stable")))

    def locate(self, index: int) -> tuple[int, EpochIndex[int]]:
        """Return the member that gives a sample, and the sample's epoch and index there."""
        period, slot = divmod(check_index(index, self.num_samples), len(self._members))
        member = int(self._members[slot])
        number = period * int(self.counts[member]) + int(self._before[slot])
        epoch, idx = divmod(number, self._lengths[member])
        if self.shuffle:
            idx = permute(idx, self._lengths[member], _seed_of(self._keys[member], epoch))
        return member, EpochIndex(epoch, idx)

    def _fetch(self, member: int, numbers: IntArray) -> Any:
        """Return the collated batch of a member's samples, by their running numbers."""
        epochs, idxs = np.divmod(numbers, self._lengths[member])
        if self.shuffle:
            key = self._keys[member]
            if epochs.min() == epochs.max():  # `permute` is faster with a single seed
                seed: Any = _seed_of(key, int(epochs[0]))
            else:
                seed = stream(key, epochs.astype(np.uint64))
            idxs = permute(idxs, self._lengths[member], seed)
        dataset = self.datasets[member]
        indices = EpochIndex(epochs, idxs) if is_indexed_by_epoch(dataset) else idxs
        return fetch_batch(dataset, indices)

    def _exhausted_after(self) -> int:
        """Return the number of samples before the first one from a member's second epoch."""
        ends = []
        for member, length in enumerate(self._lengths):
            period, number = divmod(length, int(self.counts[member]))
            slot = int(np.flatnonzero(self._members == member)[number])
            ends.append(period * len(self._members) + slot)
        return min(ends)


@lru_cache(maxsize=1024)
def _seed_of(key: int, epoch: int) -> int:
    """Return the seed of an epoch's order."""
    return int(stream(key, np.array([epoch], np.uint64))[0])


def is_indexed_by_epoch(dataset: object) -> bool:
    """Return whether a member of a blend is indexed by `EpochIndex`, as its class states.

    The class extends `MultiEpochDatasetWrapper` or `MultiEpochDataset`, or it annotates the index
    of `__getitem__` as an `EpochIndex`.
    """
    if {MultiEpochDatasetWrapper, MultiEpochDataset} & set(type(dataset).__mro__):
        return True
    annotations = getattr(getattr(type(dataset), "__getitem__", None), "__annotations__", {})
    return any("EpochIndex" in str(one) for name, one in annotations.items() if name != "return")


def _count_slots(weights: Sequence[float]) -> list[int]:
    """Convert weights to whole numbers of slots, with a total of at most `MAX_SLOTS`.

    If the shares are fractions with a common denominator of at most `MAX_SLOTS`, they are exact.
    Otherwise, `MAX_SLOTS` slots are distributed by largest remainder.
    """
    for member, weight in enumerate(weights):
        if not 0 < weight < math.inf:
            raise ValueError(f"The weight of member {member} must be positive, got {weight}.")
    exact = [Fraction(float(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    rounded = [share.limit_denominator(MAX_SLOTS) for share in shares]
    total = min(MAX_SLOTS, math.lcm(*(share.denominator for share in rounded)))
    counts = [math.floor(share * total) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda member: -(shares[member] * total % 1))
    for member in by_remainder[: total - sum(counts)]:
        counts[member] += 1
    if 0 in counts:
        raise ValueError(
            f"The weight {weights[counts.index(0)]} of member {counts.index(0)} is too small: the "
            f"smallest share is 1/{MAX_SLOTS}. Increase the weight, or leave out the member."
        )
    return counts


def _assign(counts: Sequence[int]) -> Any:
    """Distribute the slots of one period, so that each prefix has nearly each member's share.

    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980. Let T be
    the sum of `counts`, and M the number of members, at least 2. Among the first n slots, the
    number of slots of a member with count c differs from n * c / T by at most 1 - 1 / (2 * M - 2).
    This bound gives each of a member's slots an earliest and a latest place. A place goes to the
    member whose latest place is the first, among those that it is not too early for.

    Returns:
        For each slot, its member, and the member's number of slots before; int16 (2, T).
    """
    total, scale = sum(counts), max(2, 2 * len(counts) - 2)
    table = np.empty((2, total), np.int16)
    size, drawn = scale * np.array(counts), np.zeros(len(counts), np.int64)
    for slot in range(total):
        is_possible = total * (scale * drawn + 1) <= size * (slot + 1)
        latest = total * (scale * drawn + scale - 1) // size
        member = np.where(is_possible, latest, total).argmin()
        table[:, slot] = member, drawn[member]
        drawn[member] += 1
    return table


def _merge(batches: list[Any], order: IntArray) -> Any:
    """Merge the members' collated batches; `order` has each sample's position in all of them."""
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(batches).index_select(0, on_device(order, like=first))
    if isinstance(first, dict):
        return {key: _merge([batch[key] for batch in batches], order) for key in first}
    if first and isinstance(first[0], str | bytes):
        strings = [string for batch in batches for string in batch]
        return type(first)(strings[position] for position in order.tolist())
    fields = [_merge(list(values), order) for values in zip(*batches, strict=True)]
    return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)


def _form(batch: Any) -> Any:
    """Describe what the batches of all members must have in common."""
    if isinstance(batch, torch.Tensor):
        return f"{batch.dtype} {list(batch.shape[1:])}"
    if isinstance(batch, dict):
        return {key: _form(value) for key, value in batch.items()}
    if batch and isinstance(batch[0], str | bytes):
        return "strings"
    return [_form(value) for value in batch]
