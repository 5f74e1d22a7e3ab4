"""Defines the index types of datasets, and checks indices.

A float, a boolean or a slice as an index is an error. Python and numpy accept some of them: `True`
is 1, `3.0 in range(5)` is true. The checks here raise a TypeError for them. For an index outside
the dataset, including negative indices, the checks raise an IndexError.
"""

import operator
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, Protocol, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int = int | np.integer[Any]
IntArray = NDArray[np.int64]
IndexT = TypeVar("IndexT", int, IntArray)


class EpochIndex(NamedTuple, Generic[IndexT]):
    """A pair of epoch and sample index; with arrays as fields, a batch of pairs."""

    epoch: IndexT
    """The epoch, from 0; an int, or int64 of shape (B,)."""

    idx: IndexT
    """The index within the dataset, from 0; an int, or int64 of shape (B,)."""


class CheckedEpochIndex(EpochIndex[IntArray]):
    """An EpochIndex of a batch whose indices are known to be valid for a dataset's length."""

    length: int
    """The dataset's length."""


class MapDataset(Protocol):
    """A dataset with samples by index: an integer, or an `EpochIndex`."""

    def __getitem__(self, index: Any, /) -> Any: ...


def as_int(value: SupportsIndex, name: str) -> int:
    """Return an integer of any type, also of numpy, as an int."""
    if type(value) is int:
        return value
    # operator.index accepts a boolean tensor, but raises an error for a boolean of numpy.
    if not isinstance(value, bool) and "bool" not in str(getattr(value, "dtype", "")):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}.")


def as_seed(value: SupportsIndex, name: str = "The seed") -> int:
    """Return a seed as an int; a negative seed is a ValueError."""
    seed = as_int(value, name)
    if seed < 0:
        raise ValueError(f"{name} must be greater than or equal to 0, got {seed}.")
    return seed


def check_index(index: SupportsIndex, length: int) -> int:
    """Return an index of a dataset as an int, after checking its range."""
    number = as_int(index, "The index")
    if not 0 <= number < length:
        raise IndexError(f"Index {number} out of bounds for dataset of length {length}.")
    return number


def as_int_array(values: ArrayLike, name: str) -> NDArray[Any]:
    """Return an array, list or tensor of integers as an array of the same shape."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and not (array.size == 0 and isinstance(values, list | tuple)):
        raise TypeError(f"{name} must be integers, got an array of {array.dtype}.")
    return array


def as_indices(indices: ArrayLike) -> IntArray:
    """Return the indices of a batch as int64 of shape (B,), without a copy if possible."""
    given = as_int_array(indices, "The indices of a batch")
    if given.ndim != 1:
        raise TypeError(f"The indices of a batch must be one-dimensional, got {given.shape}.")
    return given.astype(np.int64, copy=False)


def check_indices(indices: ArrayLike, length: int) -> IntArray:
    """Return the indices of a batch as int64 of shape (B,), after checking their range."""
    array = as_indices(indices)
    if not all_below(array, length):
        given = np.asarray(indices)  # for the message: `array` may have wrapped a uint64 to int64
        check_index(int(given.min()), length)
        check_index(int(given.max()), length)
    return array


def all_below(array: IntArray, length: int) -> bool:
    """Tell whether all are in [0, length). A negative index viewed as uint64 exceeds any length."""
    return not array.size or int(array.view(np.uint64).max()) < length


def check_epoch_index(index: EpochIndex[int], length: int) -> EpochIndex[int]:
    """Return an EpochIndex of ints from an object with the fields `epoch` and `idx`."""
    _check_fields(index)
    epoch = as_int(index.epoch, "The epoch")
    if epoch < 0:
        raise IndexError(f"The epoch must not be negative, got {epoch}.")
    return EpochIndex(epoch, check_index(index.idx, length))


def check_epoch_indices(indices: EpochIndex[IntArray], length: int) -> EpochIndex[IntArray]:
    """Return the EpochIndex of a batch with int64 fields of the same shape (B,)."""
    if isinstance(indices, CheckedEpochIndex) and indices.length == length:
        return indices
    _check_fields(indices)
    checked = EpochIndex(check_indices(indices.epoch, 2**63), check_indices(indices.idx, length))
    if checked.epoch.shape != checked.idx.shape:
        raise TypeError(f"{checked.epoch.size} epochs do not fit {checked.idx.size} indices.")
    return checked


def _check_fields(index: object) -> None:
    if not (hasattr(index, "epoch") and hasattr(index, "idx")):
        raise TypeError(
            f"This dataset is indexed by EpochIndex(epoch, idx), got {index!r}. "
            "MultiEpochDatasetResampler around it takes plain integers."
        )


def each(indices: IntArray | EpochIndex[IntArray]) -> Iterator[int | EpochIndex[int]]:
    """Iterate over a batch's indices, as ints or as EpochIndex of ints."""
    if isinstance(indices, tuple):
        return map(EpochIndex, indices.epoch.tolist(), indices.idx.tolist())
    return iter(indices.tolist())
