"""Defines the index types of datasets, and checks indices and seeds."""

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


def as_natural(value: SupportsIndex, least: int = 0) -> int:
    """Return an integer of any type, also of numpy, as an int; a float is a TypeError."""
    number = operator.index(value)
    if number < least:
        raise ValueError(f"An integer of at least {least} is needed, got {number}.")
    return number


def as_int_array(values: ArrayLike) -> NDArray[Any]:
    """Return integers as an array of the same shape; floats are a TypeError."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise TypeError(f"Integers are needed, got an array of {array.dtype}.")
    return array


def check_indices(indices: ArrayLike, length: int) -> IntArray:
    """Return the indices of a batch as int64 of shape (B,), after checking their range."""
    array = as_int_array(indices).astype(np.int64, copy=False)
    check_index(array.min(initial=0), length)
    check_index(array.max(initial=0), length)
    return array


def check_index(index: SupportsIndex, length: int) -> int:
    """Return an index of a dataset as an int; an index outside [0, length) is an IndexError."""
    number = operator.index(index)
    if not 0 <= number < length:
        raise IndexError(f"Index {number} out of bounds for dataset of length {length}.")
    return number
