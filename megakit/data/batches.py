"""Batched fetching: one array of indices in, one collated batch out.

A dataset that can give a whole batch at once has a method `get_batch(indices)`. `indices` is int64
of shape (B,), or, for a dataset indexed by `EpochIndex`, an `EpochIndex` of two such arrays. What
it returns must equal `torch.utils.data.default_collate([dataset[i] for i in indices])`, which is
what datasets without the method get; `megakit.testing` checks that. Wrappers hand arrays on to
what they wrap, so one loader call reaches the data itself in one operation.

`__getitems__(indices)` is something else and keeps PyTorch's meaning: a list of samples.
"""

from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
from torch.utils.data import Subset, default_collate

from megakit.data.indices import EpochIndex, IntArray, each

_subset_arrays: WeakKeyDictionary[Subset, tuple[Any, IntArray | None]] = WeakKeyDictionary()


def fetch_batch(dataset: Any, indices: IntArray | EpochIndex[IntArray]) -> Any:
    """Fetch a collated batch, by `get_batch` if the dataset has it.

    A plain `torch.utils.data.Subset` (what `random_split` makes) is seen through. Its indices are
    turned into an array once; replace them by assigning a new list, not by changing the list.

    Args:
        dataset: Any map-style dataset.
        indices: int64 of shape (B,), or an EpochIndex of two such arrays; B at least 1.

    Returns:
        The collated samples; tensors in it have a first dimension B.

    Raises:
        ValueError: If there are no indices.
    """
    if not len(indices.idx if isinstance(indices, EpochIndex) else indices):
        raise ValueError("A batch needs at least one index, got none.")
    if is_current(type(dataset), "get_batch", "__getitem__"):
        return dataset.get_batch(indices)
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        array = _subset_array(dataset)
        if array is not None:
            return fetch_batch(dataset.dataset, array[indices])
    return default_collate(fetch_samples(dataset, indices))


def fetch_samples(dataset: Any, indices: IntArray | EpochIndex[IntArray]) -> list[Any]:
    """Fetch the samples at these indices as a list, by `__getitems__` if the dataset has it."""
    if is_current(type(dataset), "__getitems__", "__getitem__"):
        return cast(list[Any], dataset.__getitems__(list(each(indices))))
    return [dataset[index] for index in each(indices)]


def is_current(cls: type, batched: str, single: str) -> bool:
    """Tell whether a class's batched method still belongs to its method for single samples.

    A subclass that changes only the single one leaves the inherited batched one out of date, and
    using that would leave out the change without a word.
    """
    for base in cls.__mro__:
        if batched in vars(base):
            return True
        if single in vars(base):
            return False
    return False


def _subset_array(subset: Subset) -> IntArray | None:
    """Return a subset's indices as int64 of shape (N,), or None if they are something else."""
    source, array = _subset_arrays.get(subset, (None, None))
    if source is not subset.indices:
        indices = np.asarray(subset.indices)
        is_plain = indices.ndim == 1 and indices.dtype.kind in "iu"
        array = indices.astype(np.int64, copy=False) if is_plain else None
        _subset_arrays[subset] = (subset.indices, array)
    return array
