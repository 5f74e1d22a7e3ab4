"""Reads files of `torch.save` without `torch.load`, and returns only tensors and plain values.

`torch.load(weights_only=True)` calls every class and function that any library has registered with
`torch.serialization.add_safe_globals`. Importing NeMo and Megatron registers two dozen of them,
such as DTensor and DeviceMesh. `torch.load` also allocates any size that a file claims. The readers
here create no tensor that is larger than the bytes in the file.
"""

import functools
import io
import math
import sys
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from megakit.runtime.patching import existing
from megakit.runtime.plain_pickle import (
    PATHS,
    Argument,
    Constant,
    Entry,
    Function,
    RefusedError,
    load,
    require,
)

#: Largest accepted pickle in an archive, in bytes: pickles are small, as they have no tensor data.
MAX_PICKLE = 64 << 20
MAX_DIMENSIONS = 64


def read_archive(content: bytes) -> Any:
    """Returns the value that `torch.save` wrote.

    Args:
        content: The content of the file, a zip archive.

    Raises:
        RefusedError: The file has content other than tensors and plain values.
        ValueError: The file is damaged; other exceptions are possible as well.
    """
    archive = _Archive(content)
    return load(bytes(archive.read("data.pkl", MAX_PICKLE)), _vocabulary(), archive.find_storage)


@dataclass(frozen=True)
class _Storage:
    """The numbers of a tensor; without a dtype, the tensor that uses the storage has the dtype."""

    content: bytearray
    dtype: torch.dtype | None


class _Archive:
    """A zip archive with uncompressed members `NAME/data.pkl`, `NAME/data/0`, ...."""

    def __init__(self, content: bytes) -> None:
        self.archive = zipfile.ZipFile(io.BytesIO(content))
        #: Bytes that may still be read: members of an archive can overlap.
        self.bytes_left = len(content)
        names = set(self.archive.namelist())
        pickles = [name for name in names if name.rpartition("/")[2] == "data.pkl"]
        require(len(pickles) == 1, f"it has {len(pickles)} pickles instead of one")
        self.folder = pickles[0].removesuffix("data.pkl")
        if f"{self.folder}byteorder" in names:
            order = self.read("byteorder", 16)
            is_native = order == sys.byteorder.encode()
            require(is_native, f"its byte order is {order!r} instead of {sys.byteorder}")
        self.storages: dict[str, bytearray] = {}

    def read(self, name: str, limit: int = sys.maxsize) -> bytearray:
        """Returns a member's content, with one copy in memory."""
        info = self.archive.getinfo(self.folder + name)
        is_plain = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        require(is_plain, f"its member {name} is compressed")
        is_small = info.file_size <= min(limit, self.bytes_left)
        require(is_small, f"its member {name} has too many bytes ({info.file_size:,})")
        self.bytes_left -= info.file_size
        content = bytearray()
        with self.archive.open(info) as member:
            while piece := member.read(1 << 20):
                content += piece
        return content

    def find_storage(self, identity: Any) -> _Storage:
        """Returns the storage that a persistent id in the pickle refers to."""
        problem = "it has a persistent id that is not a storage"
        require(type(identity) is tuple and len(identity) == 5, problem)
        what, kind, key, _, _ = identity
        require(what == "storage" and type(kind) is Argument and type(key) is str, problem)
        if key not in self.storages:
            self.storages[key] = self.read(f"data/{key}")
        return _Storage(self.storages[key], kind.value)


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, *rest: Any
) -> torch.Tensor:
    """Replaces `_rebuild_tensor_v2` and `_rebuild_tensor_v3`; the tensor fits into its storage."""
    require(type(storage) is _Storage, "it creates a tensor without a storage")
    dtype = storage.dtype or next(iter(rest), None)  # `v3` names the dtype
    numbers = [offset, *_integers(size), *_integers(stride)]
    if type(dtype) is not torch.dtype or type(offset) is not int or min(numbers) < 0:
        raise RefusedError("it creates a tensor with an invalid dtype, offset, size or stride")
    is_pair = len(size) == len(stride)
    require(is_pair, "it creates a tensor whose size and stride differ in length")
    count = len(storage.content) // dtype.itemsize
    elements = math.prod(size)
    last = offset + sum((one - 1) * step for one, step in zip(size, stride, strict=True))
    fits = not elements or (elements <= count and last < count)
    require(fits, f"it creates a tensor of {elements:,} numbers from {count:,}")
    if not elements:  # torch.frombuffer refuses an empty buffer
        return torch.empty(0, dtype=dtype).as_strided(tuple(size), tuple(stride))
    flat = torch.frombuffer(storage.content, dtype=dtype, count=count)
    return flat.as_strided(tuple(size), tuple(stride), offset)


def _integers(value: Any) -> list[int]:
    if type(value) not in (tuple, torch.Size) or any(type(one) is not int for one in value):
        raise RefusedError("it has a size that is not a tuple of integers")
    # `_tensor` computes the product of all sizes.
    require(len(value) <= MAX_DIMENSIONS, f"it has a tensor of {len(value):,} dimensions")
    return list(value)


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> torch.Tensor:
    """Replaces `torch._utils._rebuild_parameter`; returns the tensor of the parameter."""
    require(type(data) is torch.Tensor, "it creates a parameter without a tensor")
    tensor: torch.Tensor = data
    return tensor


def _ordered_dict(*arguments: Any) -> Any:
    require(not arguments, "it creates an OrderedDict from arguments")
    return OrderedDict()


def _bytes(text: Any, encoding: Any) -> bytes:
    """Replaces `_codecs.encode`, with which pickle's protocol 2 writes bytes."""
    is_bytes = type(text) is str and encoding == "latin1"
    require(is_bytes, "it encodes values other than bytes")
    return str(text).encode("latin1")


def _device(*arguments: Any) -> torch.device:
    is_device = arguments and all(type(one) in (str, int) for one in arguments)
    require(bool(is_device), "it names a device that does not exist")
    return torch.device(*arguments)


@functools.cache
def data_types() -> dict[tuple[str, str], Entry]:
    """Returns the vocabulary entries for torch's data types and `torch.Size`."""
    found = {("torch", name): getattr(torch, name) for name in dir(torch)}
    return {
        **{name: Constant(one) for name, one in found.items() if type(one) is torch.dtype},
        ("torch", "Size"): Function(lambda numbers: torch.Size(_integers(numbers))),
    }


@functools.cache
def _vocabulary() -> dict[tuple[str, str], Entry]:
    kinds = existing(torch.storage, "_dtype_to_storage_type_map")()
    return {
        **data_types(),
        **{("torch", name): Argument(dtype) for dtype, name in kinds.items()},
        ("torch.storage", "UntypedStorage"): Argument(None),
        ("torch", "device"): Function(_device),
        ("torch._utils", "_rebuild_tensor_v2"): Function(_tensor),
        ("torch._utils", "_rebuild_tensor_v3"): Function(_tensor),
        ("torch._utils", "_rebuild_parameter"): Function(_parameter),
        ("collections", "OrderedDict"): Function(_ordered_dict),
        ("_codecs", "encode"): Function(_bytes),
        **PATHS,  # NeMo's `ModelCheckpoint` saves its folder
    }
