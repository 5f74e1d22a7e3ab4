"""Fetches whole batches from datasets: one array of indices in, one collated batch out.

A dataset that can return a whole batch at once has a method `get_batch(indices)`. `indices` is
int64 of shape (B,), or, for a dataset indexed by `EpochIndex`, an `EpochIndex` of two such arrays.
The result must equal `torch.utils.data.default_collate([dataset[i] for i in indices])`;
`megakit.testing` checks this. Wrappers pass the array of indices to the wrapped dataset, so that
one call fetches the batch. Without `get_batch`, samples are collated.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch.utils.data import Subset, default_collate

from megakit.data.indices import EpochIndex, IntArray


def fetch_batch(dataset: Any, indices: IntArray | EpochIndex[IntArray]) -> Any:
    """Fetch a collated batch, by `get_batch` if the dataset has it.

    Args:
        dataset: Any map-style dataset. A plain `torch.utils.data.Subset`, as from `random_split`,
            counts as the dataset inside it.
        indices: int64 of shape (B,), or an EpochIndex of two such arrays; B at least 1.

    Returns:
        The collated samples; the first dimension of each tensor is B.
    """
    if has_get_batch(type(dataset)):
        return dataset.get_batch(indices)
    if type(dataset) is Subset:
        return fetch_batch(dataset.dataset, _positions(dataset)[indices])
    return default_collate(fetch_samples(dataset, indices))


def fetch_samples(dataset: Any, indices: IntArray | EpochIndex[IntArray]) -> list[Any]:
    """Fetch a list of samples, by torch's `__getitems__` if the dataset has it."""
    if is_current(type(dataset), "__getitems__", "__getitem__"):
        return list(dataset.__getitems__(list(each(indices))))
    return [dataset[index] for index in each(indices)]


def each(indices: IntArray | EpochIndex[IntArray]) -> Iterable[int | EpochIndex[int]]:
    """Iterate over a batch's indices, as ints or as EpochIndex of ints."""
    if isinstance(indices, EpochIndex):
        return map(EpochIndex, indices.epoch.tolist(), indices.idx.tolist())
    return indices.tolist()


def has_get_batch(cls: type) -> bool:
    """Tell whether a class of datasets has a method `get_batch(indices)` for whole batches."""
    return is_current(cls, "get_batch", "__getitem__")


def is_current(cls: type, batched: str, single: str) -> bool:
    """Tell whether a class's method for batches agrees with its method for single samples.

    If a subclass overrides only the method for single samples, the inherited method for batches is
    out of date: it would silently ignore the override.
    """
    for base in cls.__mro__:
        if batched in vars(base):
            return vars(base)[batched] is not None
        if single in vars(base):
            return False
    return False


def _positions(subset: Subset[Any]) -> IntArray:
    """Return a subset's indices as an array; a list is converted once, not for each batch."""
    source, array = vars(subset).get("_positions", (None, None))
    if source is not subset.indices:
        source, array = subset.indices, np.asarray(subset.indices)
        vars(subset)["_positions"] = source, array
    assert array is not None
    return array
