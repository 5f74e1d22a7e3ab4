"""Compares nested samples exactly, and finds memory that samples share.

The path of a difference inside the sample is reported, for example `sample['tokens'][0, 3]`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Difference = Callable[[Any, Any], str | None]


class DatasetLocallyNondeterministic(AssertionError):  # noqa: N818  # BioNeMo's name
    """One process reads different samples at the same index."""


class DatasetDistributedNondeterministic(AssertionError):  # noqa: N818  # BioNeMo's name
    """One process reads equal samples, but the ranks of a job may read different ones."""


def assert_elements_equal(a: Any, b: Any) -> None:
    """Check that two samples have equal types, shapes and values, without a tolerance.

    Compares the contents of mappings, tuples, lists, dataclasses, tensors and arrays. NaN equals
    NaN.

    Raises:
        AssertionError: If the samples differ; the error names the first difference and both values.
    """
    if difference := first_difference(a, b):
        raise AssertionError(difference)


def first_difference(a: Any, b: Any, path: str = "sample") -> str | None:
    """Return a description of the first difference of two samples, or None."""
    for kind in (torch.Tensor, np.ndarray):
        if isinstance(a, kind) and isinstance(b, kind):
            return _array_difference(a, b, path)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            return f"{path} has the keys {list(a)} and {list(b)}"
    elif type(a) is not type(b):
        return f"{path} is of type {type(a).__name__} and {type(b).__name__}"
    elif isinstance(a, list | tuple) and len(a) != len(b):
        return f"{path} has {len(a)} and {len(b)} elements"
    parts_a, parts_b = _parts(a, path), _parts(b, path)
    if parts_a is None or parts_b is None:
        return None if _is_same_value(a, b) else f"{path} is {_short(a)} and {_short(b)}"
    differences = (first_difference(part, parts_b.get(at), at) for at, part in parts_a.items())
    return next(filter(None, differences), None)


def leaves(sample: Any, path: str = "sample") -> Iterator[tuple[str, Any]]:
    """Yield the innermost values of a sample with their paths."""
    parts = _parts(sample, path)
    if parts is None:
        yield path, sample
    else:
        for part_path, part in parts.items():
            yield from leaves(part, part_path)


def shared_memory(a: Any, b: Any) -> tuple[str, str] | None:
    """Return the paths of the first tensors or arrays in two samples that overlap in memory.

    Read-only arrays, for example of a memory-mapped file, are ignored, because sharing them is
    safe. Memory of other devices than the CPU is ignored, too.
    """
    memory_a, memory_b = (
        [(path, memory) for path, leaf in leaves(x) if (memory := _memory_of(leaf)) is not None]
        for x in (a, b)
    )
    for (path_a, block_a), (path_b, block_b) in itertools.product(memory_a, memory_b):
        if np.shares_memory(block_a, block_b):
            return path_a, path_b
    return None


def _parts(value: Any, path: str) -> dict[str, Any] | None:
    """Return the parts of a value by path, or None if it is a leaf."""
    if isinstance(value, Mapping):
        return {f"{path}[{key!r}]": part for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {f"{path}.{name}": getattr(value, name) for name in value._fields}
    if isinstance(value, list | tuple):
        return {f"{path}[{place}]": part for place, part in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f"{path}.{field.name}": getattr(value, field.name) for field in fields}
    return None


def _array_difference(a: Any, b: Any, path: str) -> str | None:
    for name in ("dtype", "shape", "device", "layout"):  # old arrays of numpy lack a device
        of_a, of_b = getattr(a, name, None), getattr(b, name, None)
        if of_a != of_b:
            return f"{path} has the {name} {of_a} and {of_b}"
    if isinstance(a, torch.Tensor) and a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.dtype == object:
        return first_difference(a.tolist(), b.tolist(), path)
    different = (a != b) & ((a == a) | (b == b))  # NaN and NaT equal themselves
    if not different.any():
        return None
    places = np.argwhere(np.asarray(different.cpu() if isinstance(a, torch.Tensor) else different))
    place = tuple(places[0].tolist())
    where = f"{path}{list(place)}" if place else path
    what = f"{where} is {_short(a[place])} and {_short(b[place])}"
    size = np.prod(a.shape, dtype=int)
    return what if size == 1 else f"{what} ({len(places)} of {size} values differ)"


def _is_same_value(a: Any, b: Any) -> bool:
    if a is b or bool(np.all(a == b)):
        return True
    if isinstance(a, float | complex | np.generic):
        return bool(a != a and b != b)
    # Objects of classes without `__eq__` are equal if their attributes are equal.
    if getattr(type(a), "__eq__", None) is object.__eq__ and hasattr(a, "__dict__"):
        return first_difference(vars(a), vars(b)) is None
    return False


def _short(value: Any) -> str:
    if isinstance(value, np.number | np.bool_):
        return str(value)  # numpy 2 shows the type, too: np.int64(2)
    text = repr(value.item() if isinstance(value, torch.Tensor) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


#: Integers of a size, because numpy lacks some of torch's dtypes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _memory_of(leaf: Any) -> NDArray[Any] | None:
    """Returns an array in the memory of a leaf; None if the memory cannot be changed."""
    if isinstance(leaf, np.ndarray):
        return leaf if leaf.flags.writeable else None
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.is_cpu:
        if leaf.is_conj() or leaf.is_neg():  # numpy has no such views
            return None
        return leaf.detach().view(_INTEGERS[leaf.element_size()]).numpy()
    return None
