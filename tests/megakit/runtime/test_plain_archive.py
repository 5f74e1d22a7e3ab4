"""What `torch.save` writes, read without `torch.load`: tensors within what is stored, no code."""

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from megakit.runtime.plain_archive import read_archive

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


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_tensors_and_values_come_back() -> None:
    found = read_archive(saved({"tensors": TENSORS, "values": VALUES, "size": torch.Size([1, 2])}))
    assert found["values"] == VALUES
    assert found["size"] == torch.Size([1, 2])
    for name, tensor in TENSORS.items():
        assert type(found["tensors"][name]) is torch.Tensor
        assert found["tensors"][name].dtype == tensor.dtype
        assert torch.equal(found["tensors"][name], tensor), name


def test_paths_are_values() -> None:
    """NeMo's `ModelCheckpoint` saves its folder as a path in each checkpoint of a run."""
    path = Path("/runs", "pretrain")
    assert read_archive(saved({"dirpath": path}))["dirpath"] == path


def changed(content: bytes, name: str, replacement: bytes) -> bytes:
    """The same archive with another content of one of its files."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        for info in old.infolist():
            is_it = info.filename.endswith(name)
            new.writestr(info.filename, replacement if is_it else old.read(info))
    return file.getvalue()


def pickle_of(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return archive.read(name)


TENSOR = saved(torch.zeros(200, 3))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\xc8K\x03\x86", b"M\xff\xffK\x03\x86"),  # a larger tensor
        (b"K\x03K\x01\x86", b"K\x04K\x01\x86"),  # strides that lead beyond the end
        (b"K\x03K\x01\x86", b"J\xff\xff\xff\xffK\x01\x86"),  # and before the start
        (b"QK\x00", b"QK\x01"),  # an offset, too
    ],
    ids=repr,
)
def test_tensors_larger_than_what_is_stored(old: bytes, new: bytes) -> None:
    program = pickle_of(TENSOR)
    assert program.count(old) == 1
    with pytest.raises(pickle.UnpicklingError, match="it creates a tensor"):
        read_archive(changed(TENSOR, "data.pkl", program.replace(old, new)))
