"""What `torch.save` writes, read without `torch.load`: tensors within what is stored, no code."""

import copy
import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from megakit.runtime.plain_archive import read_archive
from tests.megakit.poison import Bomb

TENSORS = {
    "matrix": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "part": torch.arange(12)[3:7],
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "uint16": torch.tensor([1, 2], dtype=torch.uint16),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}
VALUES = {"n": [1, 2.5, None, True, "é", b"\x00\xff", (1,)], "o": OrderedDict(a={1: 2})}


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def read(content: bytes) -> Any:
    return read_archive(content)


def test_tensors_and_values_come_back() -> None:
    found = read(saved({"tensors": TENSORS, "values": VALUES, "size": torch.Size([1, 2])}))
    assert found["values"] == VALUES
    assert found["size"] == torch.Size([1, 2])
    for name, tensor in TENSORS.items():
        assert type(found["tensors"][name]) is torch.Tensor
        assert found["tensors"][name].dtype == tensor.dtype
        assert torch.equal(found["tensors"][name], tensor), name


def test_paths_are_values() -> None:
    """NeMo's `ModelCheckpoint` saves its folder as a path in each checkpoint of a run."""
    path = Path("/runs", "pretrain")
    assert read(saved({"dirpath": path}))["dirpath"] == path


def test_the_same_as_torch_load_gives() -> None:
    content = saved(TENSORS)
    ours, theirs = read(content), torch.load(io.BytesIO(content), weights_only=True)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_would_run(tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system"):
        read(saved({"a": Bomb(tmp_path / "trace")}))
    assert not (tmp_path / "trace").exists()


def changed(content: bytes, name: str, replacement: bytes, **options: Any) -> bytes:
    """The same archive with another content of one of its files."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        for info in old.infolist():
            is_it = info.filename.endswith(name)
            new.writestr(info.filename, replacement if is_it else old.read(info), **options)
    return file.getvalue()


def pickle_of(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return archive.read(name)


TENSOR = saved(torch.zeros(200, 3))
#: The first four values of the persistent id of its storage; the fifth is a number.
STORAGE = b"X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\xc8K\x03\x86", b"M\xff\xffK\x03\x86"),  # a larger tensor
        (b"K\xc8K\x03\x86", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"),  # far larger
        (b"K\x03K\x01\x86", b"K\x04K\x01\x86"),  # strides that lead beyond the end
        (b"K\x03K\x01\x86", b"J\xff\xff\xff\xffK\x01\x86"),  # and before the start
        (b"K\x03K\x01\x86", b"K\x00K\x00K\x00\x87"),  # of another length
        (b"QK\x00", b"QK\x01"),  # an offset, too
        (b"QK\x00", b"QG?\xf0\x00\x00\x00\x00\x00\x00"),
    ],
    ids=repr,
)
def test_tensors_larger_than_what_is_stored(old: bytes, new: bytes) -> None:
    program = pickle_of(TENSOR)
    assert program.count(old) == 1
    with pytest.raises(pickle.UnpicklingError, match="it creates a tensor"):
        read(changed(TENSOR, "data.pkl", program.replace(old, new)))


def test_more_dimensions_than_a_tensor_has() -> None:
    """The product of a hundred thousand sizes takes minutes."""
    program = pickle_of(TENSOR).replace(b"K\xc8K\x03\x86", b"(" + b"K\x09" * 100 + b"t")
    with pytest.raises(pickle.UnpicklingError, match="100 dimensions"):
        read(changed(TENSOR, "data.pkl", program))


def test_strides_of_zero_make_no_more_than_is_stored() -> None:
    expanded = torch.zeros(1).expand(10**12)
    with pytest.raises(pickle.UnpicklingError, match="from 1"):
        read(saved(expanded))


def test_storages_that_are_missing_cut_or_compressed() -> None:
    assert torch.equal(read(changed(TENSOR, "none", b"")), torch.zeros(200, 3))
    with pytest.raises(pickle.UnpicklingError, match="from 0"):
        read(changed(TENSOR, "data/0", b""))
    with pytest.raises(pickle.UnpicklingError, match="compressed"):
        read(changed(TENSOR, "none", b"", compress_type=zipfile.ZIP_DEFLATED))
    with pytest.raises(pickle.UnpicklingError, match="byte order"):
        read(changed(TENSOR, "byteorder", b"big"))


@pytest.mark.parametrize(
    "identity",
    [
        b"K\x01",
        b"(" + STORAGE + b"t",  # too short
        b"(" + STORAGE + b"K\x03K\x03t",  # too long
        b"](" + STORAGE + b"K\x03e",  # a list
        b"(" + STORAGE.replace(b"storage", b"another") + b"K\x03t",
        b"(" + STORAGE.replace(b"ctorch\nFloatStorage\n", b"N") + b"K\x03t",
        b"(" + STORAGE.replace(b"X\x01\x00\x00\x000", b"K\x00") + b"K\x03t",
    ],
    ids=repr,
)
def test_references_to_something_else_than_a_storage(identity: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="persistent id that is not a storage"):
        read(changed(TENSOR, "data.pkl", identity + b"Q."))


def test_files_that_share_their_bytes() -> None:
    """A directory of a thousand entries for one megabyte stands for a gigabyte."""
    content, file = saved([torch.ones(1 << 18) for _ in range(8)]), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        for info in old.infolist():
            name, is_storage = info.filename, "/data/" in info.filename
            if not is_storage or name.endswith("/0"):
                new.writestr(name, old.read(info))
        (first,) = (info for info in new.filelist if info.filename.endswith("/data/0"))
        for number in range(1, 8):
            other = copy.copy(first)
            other.filename = first.filename[:-1] + str(number)
            new.filelist.append(other)
    with pytest.raises(pickle.UnpicklingError, match="too many"):
        read(file.getvalue())


@pytest.mark.parametrize("kind", [set, complex, torch.nn.Linear])
def test_other_things(kind: Any) -> None:
    value = kind(2, 2) if kind is torch.nn.Linear else kind()
    with pytest.raises(pickle.UnpicklingError, match="which no checkpoint needs"):
        read(saved(value))


def test_cut_anywhere() -> None:
    for length in range(0, len(TENSOR), 97):
        with pytest.raises((ValueError, zipfile.BadZipFile, pickle.UnpicklingError)):
            read(TENSOR[:length])
