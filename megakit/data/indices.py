"""What datasets are indexed by, and the checks that every index passes.

A float, a boolean or a slice as an index is a mistake that Python and numpy would partly let pass
(`True` is 1, `3.0 in range(5)` holds); here each is a TypeError, and a number outside the dataset,
negative ones included, an IndexError.
"""

import operator
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Int = int | np.integer[Any]
IntArray = NDArray[np.int64]
IndexT = TypeVar("IndexT", int, IntArray)


class EpochIndex(NamedTuple, Generic[IndexT]):
    """Which sample, in which epoch; with arrays as fields, a batch of such pairs."""

    epoch: IndexT
    """The epoch, from 0; an int, or int64 of shape (B,)."""

    idx: IndexT
    """The index within the dataset, from 0; an int, or int64 of shape (B,)."""


class Located(EpochIndex[IntArray]):
    """A batch's EpochIndex that was worked out, and so is known to be within a dataset."""

    length: int
    """That dataset's length."""


def as_int(value: Any, name: str) -> int:
    """Return an integer of any kind (numpy's, too) as an int.

    Raises:
        TypeError: If it is a bool, a float, a slice or anything else.
    """
    if type(value) is int:
        return value
    # A tensor of booleans would pass operator.index; numpy's already refuse.
    if not isinstance(value, bool) and "bool" not in str(getattr(value, "dtype", "")):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}.")


def check_index(index: Any, length: int) -> int:
    """Return an index into a dataset as an int.

    Raises:
        TypeError: If it is not an integer.
        IndexError: If it is not in [0, length).
    """
    number = as_int(index, "The index")
    if not 0 <= number < length:
        raise IndexError(f"Index {number} is out of bounds for a dataset of length {length}.")
    return number


def as_int_array(values: Any, name: str) -> NDArray[Any]:
    """Return integers (an array, a list, a tensor) as an array of an integer type, any shape.

    Raises:
        TypeError: If they are booleans, floats or anything else.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and not (array.size == 0 and isinstance(values, list | tuple)):
        raise TypeError(f"{name} must be integers, got an array of {array.dtype}.")
    return array


def as_indices(indices: Any) -> IntArray:
    """Return the indices of a batch as int64 of shape (B,); the array itself if it is that already.

    Raises:
        TypeError: If they are not integers, or not in one dimension.
    """
    given = as_int_array(indices, "The indices of a batch")
    if given.ndim != 1:
        raise TypeError(f"The indices of a batch must be one-dimensional, got {given.shape}.")
    return given.astype(np.int64, copy=False)


def check_indices(indices: Any, length: int) -> IntArray:
    """Return the indices of a batch as `as_indices` does.

    Raises:
        TypeError: If they are not integers, or not in one dimension.
        IndexError: If one of them is not in [0, length).
    """
    array = as_indices(indices)
    if not all_below(array, length):
        given = np.asarray(indices)  # in which a number beyond int64 is still itself
        check_index(int(given.min()), length)
        check_index(int(given.max()), length)
    return array


def all_below(array: IntArray, length: int) -> bool:
    """Tell whether all are in [0, length); seen as unsigned, a negative one is a huge one."""
    return not array.size or int(array.view(np.uint64).max()) < length


def check_epoch_index(index: Any, length: int) -> EpochIndex[int]:
    """Return an EpochIndex, or anything with its two fields, with ints in it.

    Raises:
        TypeError: If it has not the two fields, or they are not integers.
        IndexError: If `idx` is not in [0, length), or `epoch` is negative.
    """
    epoch, idx = _fields(index)
    epoch = as_int(epoch, "The epoch")
    if epoch < 0:
        raise IndexError(f"The epoch must not be negative, got {epoch}.")
    return EpochIndex(epoch, check_index(idx, length))


def check_epoch_indices(indices: Any, length: int) -> EpochIndex[IntArray]:
    """Return a batch's EpochIndex with int64 fields of shape (B,).

    Raises:
        TypeError: If it has not the two fields, or they are not integers of one shape (B,).
        IndexError: If an `idx` is not in [0, length), or an `epoch` is negative.
    """
    if isinstance(indices, Located) and indices.length == length:
        return indices
    epochs, idxs = _fields(indices)
    checked = EpochIndex(check_indices(epochs, 2**63), check_indices(idxs, length))
    if checked.epoch.shape != checked.idx.shape:
        raise TypeError(f"{checked.epoch.size} epochs do not fit {checked.idx.size} indices.")
    return checked


def _fields(index: Any) -> tuple[Any, Any]:
    try:
        return index.epoch, index.idx
    except AttributeError:
        raise TypeError(
            f"This dataset is indexed by EpochIndex(epoch, idx), got {index!r}. "
            "MultiEpochDatasetResampler around it takes plain integers."
        ) from None


def each(indices: IntArray | EpochIndex[IntArray]) -> Iterator[int | EpochIndex[int]]:
    """Walk a batch's indices one by one, as ints or as EpochIndex of ints."""
    if isinstance(indices, tuple):
        return map(EpochIndex, indices.epoch.tolist(), indices.idx.tolist())
    return iter(indices.tolist())
