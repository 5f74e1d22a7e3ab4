"""Reads `.metadata`, the pickle that lists a checkpoint's tensors and their places in files."""

import functools
import itertools
import math
import stat
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megakit.runtime.foreign_files import read_regular_file
from megakit.runtime.patching import existing
from megakit.runtime.plain_archive import data_types
from megakit.runtime.plain_pickle import (
    PATHS,
    Enumeration,
    Function,
    Record,
    RefusedError,
    Vocabulary,
    get_member,
    load,
    require,
)

#: Largest accepted file. A checkpoint of 100,000 tensors has a `.metadata` of about 30 MB.
MAX_BYTES = 64 << 20
#: Largest number of compared pairs of a tensor's parts. This many comparisons take a second.
MAX_COMPARISONS = 1_000_000


_FORMATS = existing(torch_metadata, "_MEM_FORMAT_ENCODING")
_StorageInfo: Any = existing("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_METADATA = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
_PROPERTIES = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")


def read_plain_metadata(path: Path) -> Any:
    """Returns Megatron's or torch's `Metadata` from a file, checked against the folder's files.

    Raises:
        RefusedError: The pickle does more than build metadata, or the metadata does not fit the
            other files in the folder.
        OSError: The file cannot be read.
        ValueError: The file is damaged; other exceptions are possible as well.
    """
    metadata = load(read_regular_file(path, MAX_BYTES), _vocabulary())
    _check_tensors(metadata)
    _check_places(metadata, path.parent)
    _check_lengths(metadata)
    _check_additions(metadata)
    # The place where the checkpoint was written is not used.
    metadata.storage_meta = torch_metadata.StorageMeta()
    return metadata


@functools.cache
def _vocabulary() -> Vocabulary:
    from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata

    records = {
        BytesStorageMetadata: (),
        ChunkStorageMetadata: ("offsets", "sizes"),
        Metadata: _METADATA,
        MCoreMetadata: (*_METADATA, "mcore_data"),
        MetadataIndex: ("fqn", "offset", "index"),
        torch_metadata.StorageMeta: ("checkpoint_id", "save_id", "load_id", "modules"),
        TensorStorageMetadata: ("properties", "size", "chunks"),
        _StorageInfo: ("relative_path", "offset", "length", "transform_descriptors"),
    }
    here = "torch.distributed.checkpoint.metadata"
    return {
        **data_types(),
        ("builtins", "getattr"): Function(get_member),
        **{(cls.__module__, cls.__name__): Record(cls, names) for cls, names in records.items()},
        (here, "TensorProperties"): Record(TensorProperties, _PROPERTIES, _properties),
        (here, "_MEM_FORMAT_ENCODING"): Enumeration(_FORMATS),
        ("torch.serialization", "_get_layout"): Function(_layout),
        **PATHS,
    }


def _properties(state: Any) -> dict[str, Any]:
    """Replaces `TensorProperties.__setstate__`, for the tensors that Megatron saves."""
    is_complete = type(state) is tuple and len(state) == len(_PROPERTIES)
    require(is_complete, "it has a tensor with properties of another form")
    dtype, layout, requires_grad, memory_format, pin_memory = state
    is_known = type(dtype) is torch.dtype and layout is torch.strided
    require(is_known, "it has a tensor with an unknown data type or layout")
    is_contiguous = memory_format is _FORMATS.TORCH_CONTIGUOUS_FORMAT
    require(is_contiguous, "it has a tensor with a memory format that is not contiguous")
    are_bool = type(requires_grad) is type(pin_memory) is bool
    require(are_bool, "it has a tensor with properties of other types")
    values = (dtype, layout, requires_grad, torch.contiguous_format, pin_memory)
    return dict(zip(_PROPERTIES, values, strict=True))


def _layout(name: Any) -> Any:
    require(name == "torch.strided", "it has a tensor with another layout than torch.strided")
    return torch.strided


def _check_tensors(metadata: Any) -> None:
    """Raises RefusedError unless every tensor's size, type and parts fit each other."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata

    kind = type(metadata)
    require(kind in (Metadata, MCoreMetadata), f"it has a {kind.__name__} instead of metadata")
    entries = metadata.state_dict_metadata
    require(type(entries) is dict, "it does not list its tensors")
    for name, entry in entries.items():
        require(type(name) is str, f"it names a tensor by a {type(name).__name__}")
        if type(entry) is BytesStorageMetadata:
            continue
        is_tensor = type(entry) is TensorStorageMetadata and type(entry.size) is torch.Size
        require(is_tensor, f"{name} has no size")
        properties = entry.properties
        has_dtype = type(properties) is TensorProperties and "dtype" in vars(properties)
        require(has_dtype, f"{name} has no data type")
        require(type(entry.chunks) is list, f"{name} has no list of parts")
        for chunk in entry.chunks:
            is_inside = type(chunk) is ChunkStorageMetadata and _lies_within(chunk, entry.size)
            require(is_inside, f"{name} has a part outside of the tensor")
        require(not _overlap(entry.chunks), f"{name} has parts that overlap")


def _lies_within(chunk: Any, size: Any) -> bool:
    offsets, sizes = chunk.offsets, chunk.sizes
    return (
        type(offsets) is type(sizes) is torch.Size
        and len(offsets) == len(sizes) == len(size)
        and all(
            min(offset, length) >= 0 and offset + length <= whole
            for offset, length, whole in zip(offsets, sizes, size, strict=True)
        )
    )


def _overlap(chunks: list[Any]) -> bool:
    """Returns whether two parts of a tensor share numbers; then other numbers may be missing."""
    boxes = [
        [(start, start + length) for start, length in zip(one.offsets, one.sizes, strict=True)]
        for one in chunks
        if 0 not in one.sizes
    ]
    axes = range(len(boxes[0]) if boxes else 0)
    # Sorting along the axis with the most different start positions separates the most parts.
    axis = max(axes, key=lambda one: len({box[one][0] for box in boxes}), default=0)
    boxes.sort(key=lambda box: box[axis : axis + 1])
    comparisons = 0
    for position, box in enumerate(boxes):
        for other in boxes[position + 1 :]:
            if box and other[axis][0] >= box[axis][1]:
                break  # boxes are sorted along this axis, so no further box overlaps either
            comparisons += 1
            require(comparisons <= MAX_COMPARISONS, "it has a tensor with too many parts")
            pairs = zip(box, other, strict=True)
            if all(its[0] < end and start < its[1] for (start, end), its in pairs):
                return True
    return False


def _check_places(metadata: Any, folder: Path) -> None:
    """Raises RefusedError unless every part is inside a regular file of the folder."""
    places = metadata.storage_data
    require(type(places) is dict, "it does not list the places of its tensors")
    file_sizes: dict[str, int] = {}
    slices: list[tuple[str, int, int]] = []
    for index, place in places.items():
        is_place = type(index) is MetadataIndex and type(place) is _StorageInfo
        require(is_place, "it lists the place of a value that is not a tensor")
        name = place.relative_path
        name = str(name) if isinstance(name, Path) else name
        if type(name) is not str or name in ("", "..") or Path(name).name != name or "\0" in name:
            raise RefusedError(f"it names {name!s:.200}, which is not a file in the same folder")
        if name not in file_sizes:
            status = (folder / name).lstat()
            is_regular = stat.S_ISREG(status.st_mode)
            require(is_regular, f"it names {name}, which is not a regular file")
            file_sizes[name] = status.st_size
        place.relative_path = name
        offset, length = place.offset, place.length
        are_sizes = type(offset) is type(length) is int and min(offset, length) >= 0
        require(are_sizes, f"it has a place in {name} that is not a number of bytes")
        is_inside = offset + length <= file_sizes[name]
        require(is_inside, f"it has a place beyond the end of {name}")
        is_stored = not place.transform_descriptors
        require(is_stored, f"it has a transformation of {name}, which no checkpoint needs")
        slices.append((name, offset, offset + length))
    slices.sort()
    for (name, _, end), (next_name, start, _) in itertools.pairwise(slices):
        # Otherwise thousands of parts could read one large slice.
        require(name != next_name or start >= end, f"it uses bytes of {name} twice")


def _check_lengths(metadata: Any) -> None:
    """Raises RefusedError if a part of a tensor needs more bytes than are stored for it."""
    for name, entry in metadata.state_dict_metadata.items():
        for chunk in entry.chunks if type(entry) is TensorStorageMetadata else ():
            place = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            needed = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
            is_stored = place is not None and needed <= place.length
            require(is_stored, f"{name} needs {needed:,} bytes, and the files have fewer")


def _check_additions(metadata: Any) -> None:
    """Raises RefusedError if entries of Megatron or torch's planners have an unknown form."""
    require(type(metadata.version) in (str, type(None)), "its version is not text")
    planned = metadata.planner_data
    if planned is not None and (
        type(planned) is not dict
        or any(type(key) is not str or type(path) is not tuple for key, path in planned.items())
        or any(type(step) not in (str, int) for path in planned.values() for step in path)
    ):
        raise RefusedError("its planner_data is not a dictionary of paths")
    added = getattr(metadata, "mcore_data", None)
    if added is not None and (
        type(added) is not dict
        or any(type(key) is not str or type(one) is not dict for key, one in added.items())
    ):
        raise RefusedError("its mcore_data is not a dictionary of tensors")
    if added is None and hasattr(metadata, "mcore_data"):
        metadata.mcore_data = {}
