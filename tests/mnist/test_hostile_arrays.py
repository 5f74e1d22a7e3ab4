"""Arrays of pictures that are damaged or hostile: one message each."""

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from mnist.own_pictures import read_pictures
from tests.hostile import problem


class Starts:
    """A program that unpickling would start."""

    def __init__(self, path: Path) -> None:
        self.command = f"touch {path}"

    def __reduce__(self):
        return os.system, (self.command,)


def npy(shape: str, numbers: bytes, kind: str = "|u1") -> bytes:
    """A file as numpy.save writes it, with any header."""
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + numbers


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (npy("(99999, 28, 28)", bytes(784)), ""),
        (npy("(99999999999, 28, 28)", bytes(784)), ""),
        (npy("(1, 28, 28)", bytes(783)), ""),
        (npy("(1, 28, 27)", bytes(756)), "shape (1, 28, 27)"),
        (npy("(1, 28, 28)", bytes(784 * 8), "<i8"), "numbers of type int64"),
        (b"\x93NUMPY", ""),
    ],
    ids=["many", "terabytes", "cut", "shape", "type", "no header"],
)
def test_headers(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "some.npy"
    path.write_bytes(content)
    said = problem(read_pictures, path)
    assert said.startswith(f"--input {path}: cannot be read (")
    assert fault in said
    assert len(said) < 500 + len(str(path))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path, mark = tmp_path / "some.npy", tmp_path / "ran"
    objects = np.full((1, 28, 28), None)
    objects[0, 0, 0] = Starts(mark)
    np.save(path, objects)
    assert "allow_pickle=False" in problem(read_pictures, path)
    path.write_bytes(pickle.dumps(Starts(mark)))
    assert "cannot be read" in problem(read_pictures, path)
    assert not mark.exists()
