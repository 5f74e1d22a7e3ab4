"""Reads files of `torch.save` without `torch.load`, and returns only tensors and plain values.

`torch.load(weights_only=True)` calls every class and function that any library has registered with
`torch.serialization.add_safe_globals`. Importing NeMo and Megatron registers two dozen of them,
such as DTensor and DeviceMesh. `torch.load` also allocates any size that a file claims. The readers
here create no tensor that is larger than the bytes in the file.
"""

import functools
import io
import os
import sys
import zipfile
from collections import OrderedDict
from typing import IO, Any, cast

from megakit.runtime.plain_pickle import (
    GETATTR,
    Argument,
    Constant,
    Entry,
    Function,
    RefusedError,
    load,
)

#: Largest accepted pickle in an archive, in bytes: pickles are small, as they have no tensor data.
MAX_PICKLE = 64 << 20
MAX_DIMENSIONS = 64
_File = io.RawIOBase | io.BufferedIOBase
_HEADER = 30  # bytes of a local header in a zip file, before the name


class FileSlice(io.RawIOBase):
    """A part of a file that is read as a file, for archives stored one after the other.

    torch has a similar class, whose `seek` from the end goes in the wrong direction.
    """

    def __init__(self, file: _File, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        """Returns whether `seek` works."""
        return True

    def readable(self) -> bool:
        """Returns whether `read` works."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Moves to a position relative to the start, the current position or the end."""
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = min(max(0, begin + offset), self._length)
        return self._at

    def tell(self) -> int:
        """Returns the current position."""
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Reads into a buffer, at most to the end of the slice; returns the number of bytes."""
        self._file.seek(self._offset + self._at)
        view = memoryview(buffer)[: self._length - self._at]
        count = self._file.readinto(view) or 0
        self._at += count
        return count


def read_archive(file: _File) -> Any:
    """Returns the value that `torch.save` wrote into a file.

    Raises:
        RefusedError: The file has content other than tensors and plain values.
        ValueError: The file is damaged; other exceptions are possible as well.
    """
    archive = _Archive(file)
    return load(bytes(archive.read("data.pkl", MAX_PICKLE)), _vocabulary(), archive.find_storage)


class _Archive:
    """A zip file of `torch.save` with uncompressed members `NAME/data.pkl`, `NAME/data/0`, ...."""

    def __init__(self, file: _File) -> None:
        self.file = file
        #: Bytes that may still be read; all reads together are limited to the file's size.
        self.left = file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(cast(IO[bytes], file)) as archive:
            self.members = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in self.members if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise RefusedError(f"it holds {len(pickles)} pickles instead of one")
        self.folder = pickles[0].removesuffix("data.pkl")
        if f"{self.folder}byteorder" in self.members:
            order = bytes(self.read("byteorder", 16))
            if order != sys.byteorder.encode():
                raise RefusedError(
                    f"its byte order is {order!r}, this machine's is {sys.byteorder}"
                )
        self.storages: dict[str, bytearray] = {}

    def read(self, name: str, limit: int | None = None) -> bytearray:
        """Returns a member's content."""
        info = self.members[self.folder + name]
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise RefusedError(f"{name} in it is compressed or encrypted")
        if info.file_size > (self.left if limit is None else min(limit, self.left)):
            raise RefusedError(f"{name} in it has {info.file_size:,} bytes: too many")
        self.left -= info.file_size
        self.file.seek(info.header_offset)
        header = self.file.read(_HEADER) or b""
        if len(header) != _HEADER or header[:4] != b"PK\x03\x04":
            raise RefusedError(f"{name} in it is damaged")
        lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        self.file.seek(info.header_offset + _HEADER + sum(lengths))
        content = bytearray(info.file_size)
        if self.file.readinto(content) != len(content):
            raise RefusedError(f"{name} in it is cut short")
        return content

    def find_storage(self, identity: Any) -> "_Storage":
        """Returns the storage that a persistent id in the pickle refers to."""
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            raise RefusedError("it has a persistent id that is no storage")
        _, kind, key, _, _ = identity
        if type(kind) is not Argument or type(key) is not str:
            raise RefusedError("it has a persistent id that is no storage")
        if key not in self.storages:
            self.storages[key] = self.read(f"data/{key}")
        return _Storage(self.storages[key], kind.value)


class _Storage:
    """A storage that a pickle refers to.

    Attributes:
        content: The bytes of the storage.
        dtype: Data type of the numbers; None if the tensor that uses the storage has the type.
    """

    def __init__(self, content: bytearray, dtype: Any) -> None:
        self.content = content
        self.dtype = dtype

    def numbers(self, dtype: Any) -> Any:
        """Returns all numbers in the storage as a tensor of one dimension."""
        import torch

        count = len(self.content) // dtype.itemsize
        if count == 0:  # torch.frombuffer refuses an empty buffer
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.content, dtype=dtype, count=count)


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, *rest: Any
) -> Any:
    """Replaces `torch._utils._rebuild_tensor_v2`; the tensor has to fit into its storage."""
    return _view(storage, None, offset, size, stride)


def _tensor_of_dtype(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    *rest: Any,
) -> Any:
    """Replaces `torch._utils._rebuild_tensor_v3`; the tensor has to fit into its storage."""
    return _view(storage, dtype, offset, size, stride)


def _view(storage: Any, dtype: Any, offset: Any, size: Any, stride: Any) -> Any:
    import torch

    if type(storage) is not _Storage:
        raise RefusedError("it makes a tensor of something that is no storage")
    dtype = storage.dtype or dtype
    numbers = [offset, *_integers(size), *_integers(stride)]
    if type(dtype) is not torch.dtype or type(offset) is not int or min(numbers) < 0:
        raise RefusedError("it makes a tensor of numbers that are no size")
    if len(size) != len(stride):
        raise RefusedError("it makes a tensor whose size and stride differ in length")
    flat = storage.numbers(dtype)
    elements = functools.reduce(int.__mul__, size, 1)
    last = offset + sum((one - 1) * step for one, step in zip(size, stride, strict=True))
    if elements and (elements > len(flat) or last >= len(flat)):
        raise RefusedError(f"it makes a tensor of {elements:,} numbers out of {len(flat):,}")
    return flat.as_strided(tuple(size), tuple(stride), offset if elements else 0)


def _integers(value: Any) -> list[int]:
    import torch

    if type(value) not in (tuple, torch.Size) or any(type(one) is not int for one in value):
        raise RefusedError("it gives a size that is no tuple of integers")
    if len(value) > MAX_DIMENSIONS:  # `_view` computes the product of all sizes
        raise RefusedError(f"it gives a tensor {len(value):,} dimensions")
    return list(value)


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> Any:
    """Replaces `torch._utils._rebuild_parameter`; returns the tensor of the parameter."""
    import torch

    if type(data) is not torch.Tensor:
        raise RefusedError("it makes a parameter of something that is no tensor")
    return data


def _ordered_dict(*arguments: Any) -> Any:
    if arguments:
        raise RefusedError("it makes an OrderedDict of arguments")
    return OrderedDict()


def _bytes(text: Any, encoding: Any) -> bytes:
    """Replaces `_codecs.encode`, with which pickle's protocol 2 writes bytes."""
    if type(text) is not str or encoding != "latin1":
        raise RefusedError("it encodes something else than bytes")
    return text.encode("latin1")


def _size(numbers: Any) -> Any:
    import torch

    return torch.Size(_integers(numbers))


def _device(*arguments: Any) -> Any:
    import torch

    if not arguments or any(type(one) not in (str, int) for one in arguments):
        raise RefusedError("it gives a device that does not exist")
    return torch.device(*arguments)


@functools.cache
def data_types() -> dict[tuple[str, str], Entry]:
    """Returns the vocabulary entries for torch's data types and `torch.Size`."""
    import torch

    found = {("torch", name): getattr(torch, name) for name in dir(torch)}
    return {
        **{name: Constant(one) for name, one in found.items() if type(one) is torch.dtype},
        ("torch", "Size"): Function(_size),
    }


@functools.cache
def _vocabulary() -> dict[tuple[str, str], Entry]:
    import torch

    kinds = torch.storage._dtype_to_storage_type_map()
    return {
        **data_types(),
        **GETATTR,
        **{("torch", name): Argument(dtype) for dtype, name in kinds.items()},
        ("torch.storage", "UntypedStorage"): Argument(None),
        ("torch", "device"): Function(_device),
        ("torch._utils", "_rebuild_tensor_v2"): Function(_tensor),
        ("torch._utils", "_rebuild_tensor_v3"): Function(_tensor_of_dtype),
        ("torch._utils", "_rebuild_parameter"): Function(_parameter),
        ("collections", "OrderedDict"): Function(_ordered_dict),
        ("_codecs", "encode"): Function(_bytes),
    }
