"""Compares nested samples exactly.

The path of a difference inside the sample is reported, for example `sample['tokens'][0, 3]`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def assert_elements_equal(a: Any, b: Any) -> None:
    """Check that two samples have equal types, shapes and values, without a tolerance.

    Compares the contents of mappings, tuples, lists, dataclasses, tensors and arrays. NaN equals
    NaN.

    Raises:
        AssertionError: If the samples differ; the error names the first difference and both values.
    """
    if difference := first_difference(a, b, "sample"):
        raise AssertionError(difference)


def first_difference(a: Any, b: Any, path: str) -> str | None:
    """Return a description of the first difference of two samples, or None."""
    if type(a) is not type(b):
        return f"{path} is of type {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, torch.Tensor | np.ndarray):
        return _array_difference(a, b, path)
    parts_a, parts_b = _parts(a), _parts(b)
    if parts_a is None or parts_b is None:
        is_same = a is b or a == b or (a != a and b != b)
        return None if is_same else f"{path} is {a!r} and {b!r}"
    if parts_a.keys() != parts_b.keys():
        return f"{path} has the parts {list(parts_a)} and {list(parts_b)}"
    differences = (
        first_difference(part, parts_b[key], f"{path}[{key!r}]") for key, part in parts_a.items()
    )
    return next(filter(None, differences), None)


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a value by key, or None if it is compared as a whole."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    # Objects of classes without `__eq__` are equal if their attributes are equal.
    own_equality: Any = type(value).__eq__
    if dataclasses.is_dataclass(value) or own_equality is object.__eq__:
        return getattr(value, "__dict__", None)
    return None


def _array_difference(a: Any, b: Any, path: str) -> str | None:
    for name in ("dtype", "shape"):
        if getattr(a, name) != getattr(b, name):
            return f"{path} has the {name} {getattr(a, name)} and {getattr(b, name)}"
    different = torch.as_tensor((a != b) & ((a == a) | (b == b)))  # NaN equals itself
    if not different.any():
        return None
    place = tuple(different.nonzero()[0].tolist())
    return f"{path}{list(place) if place else ''} is {a[place]} and {b[place]}"
