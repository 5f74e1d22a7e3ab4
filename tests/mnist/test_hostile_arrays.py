"""Arrays of pictures that are damaged or hostile: one message each."""

import struct
from pathlib import Path

import numpy as np
import pytest

from mnist.own_pictures import read_pictures
from tests.hostile import problem


def npy(header: str, numbers: bytes) -> bytes:
    """A file as numpy.save writes it, with any header."""
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode() + numbers


def described(shape: str, descr: str = "'|u1'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n"


IMAGE = np.tile(np.arange(0, 252, 9, np.uint8), (28, 1))[None]
PLAIN = IMAGE.tobytes()


class TestArrays:
    @pytest.mark.parametrize(
        ("content", "fault"),
        [
            (npy(described("(99999, 28, 28)"), PLAIN), "784 bytes of numbers, expected 78,399,216"),
            (npy(described("(1, 28, 28)"), PLAIN[:-1]), "783 bytes of numbers"),
            (npy(described("(1, 28, 28)", "'|O'"), PLAIN), "type object"),
            (b"\x93NUMPY", "cannot be read"),
        ],
        ids=["many", "cut", "objects", "no header"],
    )
    def test_headers(self, tmp_path: Path, content: bytes, fault: str) -> None:
        path = tmp_path / "some.npy"
        path.write_bytes(content)
        said = problem(read_pictures, path)
        assert said.startswith(f"--input {path}: cannot be read (")
        assert fault in said
        assert len(said) < 500 + len(str(path))
