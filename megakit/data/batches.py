"""Fetches whole batches from datasets: one array of indices in, one collated batch out.

A dataset that can return a whole batch at once has a method `get_batch(indices)`; a `get_batch` of
another signature is not called. `indices` is int64 of shape (B,), or, for a dataset indexed by
`EpochIndex`, an `EpochIndex` of two such arrays.
The result must equal `torch.utils.data.default_collate([dataset[i] for i in indices])`;
`megakit.testing` checks this. For a dataset without `get_batch`, `fetch_batch` collates samples.
Wrappers pass the array of indices to the wrapped dataset, so that one call fetches the batch.

`__getitems__(indices)` has PyTorch's meaning: it returns a list of samples.
"""

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch.utils.data import Subset, default_collate

from megakit.data.indices import EpochIndex, IntArray, MapDataset, each

_subset_arrays: WeakKeyDictionary[Subset, tuple[Any, IntArray | None]] = WeakKeyDictionary()
_has_get_batch: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def fetch_batch(dataset: MapDataset, indices: IntArray | EpochIndex[IntArray]) -> Any:
    """Fetch a collated batch, by `get_batch` if the dataset has it.

    For a plain `torch.utils.data.Subset`, as from `random_split`, the batch is fetched from the
    dataset inside. The Subset's indices are converted to an array once. To change the indices,
    assign a new list; a change of the existing list has no effect.

    Args:
        dataset: Any map-style dataset.
        indices: int64 of shape (B,), or an EpochIndex of two such arrays; B at least 1.

    Returns:
        The collated samples; the first dimension of each tensor is B.

    Raises:
        ValueError: If there are no indices.
    """
    if not len(indices.idx if isinstance(indices, EpochIndex) else indices):
        raise ValueError("A batch needs at least one index, got none.")
    if has_get_batch(type(dataset)):
        return getattr(dataset, "get_batch")(indices)  # noqa: B009
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        array = _subset_array(dataset)
        if array is not None:
            return fetch_batch(dataset.dataset, array[indices])
    return default_collate(fetch_samples(dataset, indices))


def fetch_samples(dataset: MapDataset, indices: IntArray | EpochIndex[IntArray]) -> list[Any]:
    """Fetch a list of samples, by `__getitems__` if the dataset has it."""
    if is_current(type(dataset), "__getitems__", "__getitem__"):
        samples: list[Any] = getattr(dataset, "__getitems__")(list(each(indices)))  # noqa: B009
        return samples
    return [dataset[index] for index in each(indices)]


def has_get_batch(cls: type) -> bool:
    """Tell whether a class of datasets has a method `get_batch(indices)` for whole batches.

    A user's class may have a method of this name with another purpose, for example
    `get_batch(size)`. So the first parameter must be named `indices`.
    """
    if cls not in _has_get_batch:
        current = is_current(cls, "get_batch", "__getitem__")
        method = inspect.getattr_static(cls, "get_batch", None)
        is_method = not isinstance(method, staticmethod | classmethod)
        _has_get_batch[cls] = current and is_method and _takes_indices(method)
    return _has_get_batch[cls]


def _takes_indices(method: Any) -> bool:
    try:
        parameters = list(inspect.signature(method).parameters.values())[1:]  # after self
    except (TypeError, ValueError):  # not a function, or a compiled one
        return False
    if inspect.iscoroutinefunction(method) or not parameters:
        return False
    if parameters[0].name != "indices" or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return False
    required = [one for one in parameters if one.default is one.empty]
    return all(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in required[1:])


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


def _subset_array(subset: Subset) -> IntArray | None:
    """Return a subset's indices as int64 of shape (N,), or None if they are not integers (N,)."""
    source, array = _subset_arrays.get(subset, (None, None))
    if source is not subset.indices:
        indices = np.asarray(subset.indices)
        is_plain = indices.ndim == 1 and indices.dtype.kind in "iu"
        array = indices.astype(np.int64, copy=False) if is_plain else None
        _subset_arrays[subset] = (subset.indices, array)
    return array
