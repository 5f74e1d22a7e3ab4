"""What a `.metadata` may name: nothing that stands for code, and no place outside its folder."""

import dataclasses
import enum
import importlib
import itertools
import pickle
import random
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megakit.errors import UserError
from megakit.runtime import plain_archive, plain_metadata
from megakit.runtime.plain_pickle import Argument, Constant, Enumeration, Record, Vocabulary
from tests.megakit.poison import Bomb, metadata_of, refusal, write_metadata

pytestmark = pytest.mark.usefixtures("megatron")

#: Arguments with which Python's own functions lead to code.
HOSTILE = (str, Path, Path(), "mro", "__class__", "os", "latin1", 1, (1,), {"a": print})


def is_plain(value: Any) -> bool:
    """Whether a value is a number, text, a path, a tensor, one of their types, or empty."""
    leaves = (*(type(None), bool, int, float, str, bytes), *(torch.dtype, torch.layout))
    others = (torch.device, torch.Size, torch.Tensor, type(Path()))
    return (
        type(value) in (*leaves, *others) or isinstance(value, enum.Enum) or value == OrderedDict()
    )


@pytest.mark.parametrize("vocabulary", [plain_archive._vocabulary, plain_metadata._vocabulary])
def test_no_name_stands_for_code(vocabulary: Callable[[], Vocabulary]) -> None:
    for name, entry in vocabulary().items():
        if isinstance(entry, Constant | Argument):
            assert is_plain(entry.value), name
            continue
        if isinstance(entry, Record):
            assert set(entry.names) <= {field.name for field in dataclasses.fields(entry.cls)}, name
            continue
        if isinstance(entry, Enumeration):
            assert issubclass(entry.cls, enum.Enum), name
        else:
            assert type(entry.build) is FunctionType, name
            assert entry.build.__module__.startswith("megakit.runtime."), name
        for count in range(4):
            for arguments in itertools.product(HOSTILE, repeat=count):
                try:
                    value = entry.build(*arguments)
                except Exception:  # the loader refuses the pickle for any of them
                    continue
                assert is_plain(value), (name, arguments)


def test_poisoned_metadata(checkpoint: Path, tmp_path: Path) -> None:
    write_metadata(checkpoint, Bomb(tmp_path / "trace"))
    message = refusal(checkpoint, tmp_path / "trace")
    assert f"{checkpoint}/weights/.metadata" in message
    assert "posix.system" in message


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "torch.load", "torch._utils._rebuild_tensor", "torch.hub.load", "os.system"],
)
def test_only_what_is_needed_can_be_named(checkpoint: Path, name: str) -> None:
    module, _, function = name.rpartition(".")
    program = f"c{module}\n{function}\n.".encode()  # pickle's instruction to look up a name
    (checkpoint / "weights" / ".metadata").write_bytes(program)
    assert f"names {name}, which no checkpoint needs" in refusal(checkpoint)


CLASSES = (
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "pathlib.PosixPath",
    "collections.OrderedDict",
    "torch.Size",
)


@pytest.mark.parametrize("name", CLASSES)
def test_no_class_is_changed(checkpoint: Path, name: str) -> None:
    """Pickle's BUILD sets attributes of whatever is on its stack, a class as well."""
    module, _, cls = name.rpartition(".")
    owner = getattr(importlib.import_module(module), cls)
    before = dict(vars(owner))
    program = f"c{module}\n{cls}\n".encode() + b"N}X\x04\x00\x00\x00evilK\x01s\x86b."
    (checkpoint / "weights" / ".metadata").write_bytes(program)
    message = refusal(checkpoint)
    assert "weights/.metadata: cannot be read" in message
    assert dict(vars(owner)) == before


def test_no_program_changes_a_class_or_leaves_one() -> None:
    """Random programs over all that a `.metadata` may name."""
    from megakit.runtime.plain_metadata import _vocabulary
    from megakit.runtime.plain_pickle import Record, load

    vocabulary = _vocabulary()
    records = [entry.cls for entry in vocabulary.values() if isinstance(entry, Record)]
    owners = [*records, Path, pickle.Unpickler]
    before = [dict(vars(owner)) for owner in owners]
    names = [f"c{module}\n{name}\n".encode() for module, name in vocabulary if module != "torch"]
    words = ["fqn", "offset", "torch.strided", "TORCH_CONTIGUOUS_FORMAT", "relative_path", "/tmp"]
    texts = [b"X" + struct.pack("<I", len(word)) + word.encode() for word in words]
    operations = [*names, *texts, b"ctorch\nfloat32\n", b"ctorch\nSize\n", b"K\x01", b"N", b")"]
    operations += [bytes([code]) for code in b"]}(t\x85\x86asRb\x81\x94"]
    dice = random.Random(1)
    kept = 0
    for _ in range(20_000):
        program = b"".join(dice.choice(operations) for _ in range(dice.randrange(1, 9)))
        try:
            value = load(program + b".", vocabulary)
        except Exception:  # `reading` makes a UserError of whatever it is
            continue
        kept += 1
        assert not isinstance(value, type)
        assert not callable(value)
    assert kept > 100
    assert [dict(vars(owner)) for owner in owners] == before


NO_FILE = "which is not a file in the same folder"
NAMES = ("../../secret", "/etc/passwd", "folder/file", b"__0_0.distcp", 7, "", "..", ".")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        *(("relative_path", value, f"names {str(value)[:200]}, {NO_FILE}") for value in NAMES),
        ("relative_path", "absent.distcp", "No such file"),
        *(("offset", value, "is not a number of bytes") for value in (-1, 1.5, True)),
        *((name, 10**15, "beyond the end") for name in ("offset", "length")),
        ("transform_descriptors", ("zstd",), "a transformation of"),
    ],
)
def test_a_place_that_leads_astray(checkpoint: Path, name: str, value: Any, told: str) -> None:
    metadata = metadata_of(checkpoint)
    setattr(next(iter(metadata.storage_data.values())), name, value)
    write_metadata(checkpoint, metadata)
    assert told in refusal(checkpoint)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("size", (10**6, 10**6), "weights do not fit"),
        ("size", (1, 1), "a part outside of the tensor"),
        ("size", (6,), "a part outside of the tensor"),
        ("chunks", [], "module.first.weight has 0 of 48 numbers"),
        ("chunks", "twice", "parts that overlap"),
        ("chunks", None, "no list of parts"),
        ("properties", None, "no data type"),
    ],
)
def test_sizes_are_compared_with_what_is_stored(
    checkpoint: Path, name: str, value: Any, told: str
) -> None:
    metadata = metadata_of(checkpoint)
    entry = metadata.state_dict_metadata["module.first.weight"]
    if value == "twice":
        value = entry.chunks * 2
    setattr(entry, name, torch.Size(value) if name == "size" else value)
    write_metadata(checkpoint, metadata)
    assert told in refusal(checkpoint)


def test_a_tensor_larger_than_its_parts(checkpoint: Path) -> None:
    """No memory is allocated for what is not stored."""
    from megakit.models.loading import read_tensors

    metadata = metadata_of(checkpoint)
    metadata.state_dict_metadata["module.first.weight"].size = torch.Size((2**50, 6))
    write_metadata(checkpoint, metadata)
    with pytest.raises(UserError, match="of 6,755,399,441,055,744 numbers"):
        read_tensors(str(checkpoint / "weights"))


def test_bytes_of_a_file_serve_one_tensor(checkpoint: Path) -> None:
    """Thousands of parts that name one large slice would read it thousands of times."""
    metadata = metadata_of(checkpoint)
    places = list(metadata.storage_data.values())
    one, other = [place for place in places if place.relative_path == places[0].relative_path][:2]
    other.offset, other.length = one.offset, max(one.length, other.length)
    write_metadata(checkpoint, metadata)
    assert "twice" in refusal(checkpoint)


def box(*axes: tuple[int, int]) -> ChunkStorageMetadata:
    """A part of a tensor, by its begin and length along each axis."""
    begins, lengths = zip(*axes, strict=True)
    return ChunkStorageMetadata(torch.Size(begins), torch.Size(lengths))


def numbers_of(part: ChunkStorageMetadata) -> set[tuple[int, ...]]:
    axes = zip(part.offsets, part.sizes, strict=True)
    return set(itertools.product(*(range(begin, begin + length) for begin, length in axes)))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_tensor_in_thousands_of_parts_is_checked_at_once(axis: int) -> None:
    spans = [[(0, 1), (0, 1)] for _ in range(20_000)]
    for number, span in enumerate(spans):
        span[axis] = (number, 1)
    parts = [box(*span) for span in spans]
    began = time.process_time()
    assert not plain_metadata._overlap(parts)
    assert time.process_time() - began < 10
    assert plain_metadata._overlap([*parts, parts[2500]])


SPAN = st.tuples(st.integers(0, 8), st.integers(0, 3))
PARTS = st.integers(1, 3).flatmap(
    lambda axes: st.lists(st.tuples(*[SPAN] * axes).map(lambda spans: box(*spans)), max_size=8)
)


@given(PARTS)
@settings(max_examples=300, deadline=None)
# The first and the third overlap; the second lies between them along one axis, but not the other.
@example([box((0, 2), (0, 1)), box((0, 3), (2, 1)), box((1, 1), (0, 1)), box((1, 1), (4, 1))])
def test_parts_overlap_if_they_share_a_number(parts: list[ChunkStorageMetadata]) -> None:
    numbers = list(map(numbers_of, parts))
    shared = any(one & other for one, other in itertools.combinations(numbers, 2))
    assert plain_metadata._overlap(parts) == shared


def test_a_part_that_claims_more_than_its_file_has(checkpoint: Path) -> None:
    metadata = metadata_of(checkpoint)
    entry = metadata.state_dict_metadata["module.first.weight"]
    entry.size = torch.Size((10**6, 10**6))
    entry.chunks[0].sizes = entry.size
    write_metadata(checkpoint, metadata)
    assert "4,000,000,000,000 bytes, and the files have fewer" in refusal(checkpoint)
