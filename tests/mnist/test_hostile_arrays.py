"""Arrays of pictures that are hostile or unusual: one message each, within bounded memory."""

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnist.own_pictures import read_pictures, to_training_form
from tests.hostile import problem, refused_within


def npy(
    header: str, numbers: bytes, version: tuple[int, int] = (1, 0), length: int | None = None
) -> bytes:
    """A file as numpy.save writes it, with any header."""
    size = struct.pack("<H" if version == (1, 0) else "<I", length or len(header))
    return b"\x93NUMPY" + bytes(version) + size + header.encode() + numbers


def described(shape: str, descr: str = "'|u1'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n"


def saved(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


IMAGE = np.tile(np.arange(0, 252, 9, np.uint8), (28, 1))[None]
PLAIN = IMAGE.tobytes()


class TestArrays:
    @pytest.mark.parametrize(
        ("content", "fault"),
        [
            (npy(described("(1000000000000, 28, 28)"), PLAIN), "shape (1000000000000, 28, 28)"),
            (npy(described("(99999, 28, 28)"), PLAIN), "784 bytes of numbers, expected 78,399,216"),
            (npy(described("(99999, 28, 28)", "'<f8'"), PLAIN), "expected 627,193,728"),
            (npy(described("(-1, 28, 28)"), PLAIN), "shape (-1, 28, 28)"),
            (npy(described("(1, 28, 28)"), PLAIN[:-1]), "783 bytes of numbers"),
            (npy(described("(1, 28, 28)"), PLAIN * 2), "1,568 bytes of numbers"),
            (npy(described("(1, 28, 28)", "'|V784'"), PLAIN), "type |V784"),
            (npy(described("(1, 28, 28)", "[('a', '|u1')]"), PLAIN), "type [('a', 'u1')]"),
            (npy(described("(1, 28, 28)", "'|O'"), PLAIN), "type object"),
            (npy(described("(1, 28, 28)", "'no type'"), PLAIN), "cannot be read"),
            *((npy(nested * 9000, PLAIN), "cannot be read") for nested in "[(-{"),
            (npy("[" * 60_000, PLAIN), "cannot be read"),
            (npy(described("(1, 28, 28)") + " " * 20_000, PLAIN), "may not be safe"),
            (npy(described("(1, 28, 28)"), PLAIN, (2, 0), 2**32 - 1), "EOF"),
            (npy(described("(1, 28, 28)"), PLAIN, (3, 0)), "format version 3.0"),
            (npy(described("(1, 28, 28)"), PLAIN, (9, 9)), "cannot be read"),
            (b"", "cannot be read"),
            (b"\x93NUMPY", "cannot be read"),
            (saved(np.array([[{}]])), "shape (1, 1)"),
            (saved(np.full((2, 28, 28), np.inf)), "from inf to inf"),
            (saved(np.array([np.nan] * 784).reshape(1, 28, 28)), "from nan to nan"),
        ],
        ids=range(24),
    )
    def test_headers(self, tmp_path: Path, content: bytes, fault: str) -> None:
        path = tmp_path / "some.npy"
        path.write_bytes(content)
        said = problem(read_pictures, path)
        assert said.startswith(f"--input {path}: cannot be read (")
        assert fault in said
        assert len(said) < 500 + len(str(path))

    @pytest.mark.parametrize(
        ("header", "version", "length"),
        [
            (described("(1000000000000, 28, 28)"), (1, 0), None),
            (described("(3000000, 28, 28)"), (1, 0), None),
            (described("(1, 28, 28)"), (2, 0), 2**32 - 1),
        ],
    )
    def test_no_memory_for_what_is_not_there(
        self, tmp_path: Path, header: str, version: tuple[int, int], length: int | None
    ) -> None:
        path = tmp_path / "some.npy"
        path.write_bytes(npy(header, PLAIN, version, length))
        assert "cannot be read" in refused_within(10, "own_pictures.read_pictures(path)", path)

    @pytest.mark.parametrize(
        "array",
        [
            np.asfortranarray(np.concatenate([IMAGE, IMAGE.swapaxes(1, 2)])),
            *(np.repeat(IMAGE, 2, 0).astype(kind) / 255 for kind in ("<f4", "<f8")),
            *((IMAGE / 255).astype(kind) for kind in (">f2", "<f2", ">f4", ">f8", np.longdouble)),
        ],
        ids=range(8),
    )
    def test_orders_and_types(self, tmp_path: Path, array: np.ndarray) -> None:
        np.save(tmp_path / "some.npy", array)
        read = read_pictures(tmp_path / "some.npy").images
        expected = array if array.dtype == np.uint8 else np.rint(array.astype(float) * 255)
        np.testing.assert_array_equal(read, [to_training_form(x) for x in expected.astype("u1")])

    def test_many_floats_take_little_more_than_their_file(self, tmp_path: Path) -> None:
        array = np.zeros((40_000, 28, 28), np.float32)  # 125 MB
        array[:, 5:25, 11:19] = 1
        array[-1, -1, -1] = 2
        np.save(tmp_path / "some.npy", array)
        path = tmp_path / "some.npy"
        said = refused_within(150, "own_pictures.read_pictures(path)", path)
        assert "values from 0 to 2" in said
