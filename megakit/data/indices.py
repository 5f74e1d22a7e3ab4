"""Defines the index types of datasets, and checks indices."""

import operator
from typing import Any, Generic, NamedTuple, SupportsIndex, TypeVar

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


def as_int(value: SupportsIndex, name: str) -> int:
    """Return an integer of any type, also of numpy, as an int; a float is a TypeError."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an integer, got {value!r} of type {type(value).__name__}."
        ) from None


def as_seed(value: SupportsIndex, name: str = "The seed") -> int:
    """Return a seed as an int; a negative seed is a ValueError."""
    seed = as_int(value, name)
    if seed < 0:
        raise ValueError(f"{name} must be greater than or equal to 0, got {seed}.")
    return seed


def as_int_array(values: ArrayLike, name: str) -> NDArray[Any]:
    """Return integers as an array of the same shape; floats are a TypeError."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got an array of {array.dtype}.")
    return array


def check_indices(indices: ArrayLike, length: int) -> IntArray:
    """Return the indices of a batch as int64 of shape (B,), after checking their range.

    Raises:
        TypeError: If an index is no integer.
        IndexError: If an index is outside [0, length).
    """
    array = as_int_array(indices, "The indices of a batch").astype(np.int64, copy=False)
    if array.size and not 0 <= array.min() <= array.max() < length:
        for index in array.tolist():
            check_index(index, length)
    return array


def check_index(index: SupportsIndex, length: int) -> int:
    """Return an index of a dataset as an int, after checking its range."""
    number = as_int(index, "The index")
    if not 0 <= number < length:
        raise IndexError(f"Index {number} out of bounds for dataset of length {length}.")
    return number
