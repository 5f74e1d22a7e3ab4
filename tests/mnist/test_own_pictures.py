"""A user's pictures: what comes out of each kind, worked out by hand, and what is refused."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megakit.errors import UserError
from mnist import files as mnist_files
from mnist import own_pictures
from mnist.own_pictures import read_pictures
from tests.mnist.test_training_form import enlarged, stroke
from tests.refusals import problem, problems

DIGITS = mnist_files.read_digits("test")[0]


def draw(path, pixels, mode=None, **options):
    image = Image.fromarray(np.asarray(pixels, np.uint8))
    (image.convert(mode) if mode else image).save(path, **options)
    return path


class TestFiles:
    def test_a_folder_in_order_of_names_with_a_remark_for_each_kind(self, tmp_path):
        draw(tmp_path / "2.png", stroke(paper=140, ink=0))
        draw(tmp_path / "0.png", DIGITS[0])
        draw(tmp_path / "1.png", stroke(60, 60))
        (tmp_path / ".DS_Store").write_bytes(b"hidden")
        read = read_pictures(tmp_path)
        assert np.array_equal(read.images[0], DIGITS[0])
        assert np.array_equal(read.images[2], stroke())
        assert read.sources == ["0.png", "1.png", "2.png"]
        assert sorted(read.remarks) == [
            "1 of 3 pictures: inverted, because the ink was dark.",
            "2 of 3 pictures: scaled to fit 20x20 pixels and centred in 28x28.",
        ]

    @pytest.mark.parametrize(
        ("pixels", "mode", "remark"),
        [
            *((stroke(), mode, None) for mode in ("1", "L", "P", "RGB")),
            (np.where(stroke()[..., None] > 0, [0, 0, 120], [255, 255, 200]), None, "colours"),
            # Transparent is paper, whatever the colour of the ink is, and of what is not seen.
            (np.stack([np.zeros((28, 28))] * 3 + [stroke()], -1), None, "transparent pixels count"),
            (np.stack([stroke()] * 4, -1), None, "transparent pixels count as paper"),
        ],
    )
    def test_modes(self, tmp_path, pixels, mode, remark):
        read = read_pictures(draw(tmp_path / "a.png", pixels, mode))
        assert np.array_equal(read.images[0], stroke())
        assert any(remark in each for each in read.remarks) if remark else not read.remarks

    def test_sixteen_bits(self, tmp_path):
        deep, expected = stroke().astype(np.uint16) * 257, stroke()
        deep[9, 14], expected[9, 14] = 129 * 257 - 57, 129  # nearer to 129 than to 128
        Image.fromarray(deep).save(tmp_path / "deep.png")
        read = read_pictures(tmp_path / "deep.png")
        assert np.array_equal(read.images[0], expected)
        assert "16 bits" in read.remarks[0]

    def test_turned_by_the_camera(self, tmp_path):
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned by 90 degrees when shown
        draw(tmp_path / "a.jpg", np.rot90(255 - enlarged(stroke(), 8)), exif=exif)
        ys, xs = np.nonzero(read_pictures(tmp_path / "a.jpg").images[0] > 64)
        assert [np.ptp(ys) + 1, np.ptp(xs) + 1] == [20, 8]

    def test_names_break_nothing(self, tmp_path):
        """Neither messages nor the lines of predictions.csv nor a terminal."""
        for name in (b"a\nb.png", b"\x1b[2J.png", b"caf\xe9.png", b"=1+1.png", "é ü.png".encode()):
            path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
            draw(path, stroke(), format="PNG")
        sources = read_pictures(tmp_path).sources
        assert sources == ["\\x1b[2J.png", "=1+1.png", "a\\nb.png", "caf\\udce9.png", "é ü.png"]


class TestArrays:
    @pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
    def test_read(self, tmp_path, dtype):
        is_whole = dtype is np.uint8
        np.save(tmp_path / "some.npy", DIGITS[:3] if is_whole else (DIGITS[:3] / 255).astype(dtype))
        read = read_pictures(tmp_path / "some.npy")
        assert np.array_equal(read.images, DIGITS[:3])
        assert read.sources == ["some.npy[0]", "some.npy[1]", "some.npy[2]"]
        scaled = ["3 of 3 pictures: values from 0 to 1 scaled to 0 to 255."]
        assert read.remarks == ([] if is_whole else scaled)

    @pytest.mark.parametrize(
        ("array", "fault"),
        [
            (np.zeros((28, 28), np.uint8), "shape (28, 28)"),
            (np.zeros((0, 28, 28), np.uint8), "shape (0, 28, 28)"),
            (np.zeros((2, 28, 28), np.int64), "numbers of type int64"),
            (np.full((2, 28, 28), 255.0), "values from 255 to 255"),
            (np.full((2, 28, 28), np.nan), "nan"),
            (np.full((1, 28, 28), None), "allow_pickle=False"),
        ],
    )
    def test_refused(self, tmp_path, array, fault):
        np.save(tmp_path / "some.npy", array)
        said = problem(read_pictures, tmp_path / "some.npy")
        assert said.startswith(f"--input {tmp_path}/some.npy: cannot be read (")
        assert fault in said
        assert said.endswith(
            "The array must have shape (N > 0, 28, 28), and uint8 from 0 to 255 "
            "or floats from 0 to 1."
        )

    @pytest.mark.parametrize("shape", ["(99999999999, 28, 28)", "(2, 28, 28)"])
    def test_headers_that_promise_more(self, tmp_path, shape):
        header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}\n".encode()
        content = b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + bytes(784)
        (tmp_path / "some.npy").write_bytes(content)
        assert "cannot be read" in problem(read_pictures, tmp_path / "some.npy")

    def test_elements_are_named(self, tmp_path):
        array = DIGITS[:4].copy()
        array[[1, 3]] = 7
        np.save(tmp_path / "some.npy", array)
        found = problems(read_pictures, tmp_path / "some.npy")
        assert ["some.npy[1]: contains no ink" in found[0], len(found)] == [True, 2]
        assert "some.npy[3]: contains no ink" in found[1]


class TestRefusals:
    def put_strangers(self, folder):
        """Files that cannot be used, in the order of their names."""
        draw(folder / "blank.png", np.full((30, 30), 255))
        draw(folder / "cut.png", np.random.default_rng(0).integers(0, 255, (99, 99)))
        (folder / "cut.png").write_bytes((folder / "cut.png").read_bytes()[:3000])
        (folder / "drawing.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
        (folder / "empty.jpg").touch()
        draw(folder / "film.png", stroke(), format="GIF")
        (folder / "more").mkdir()

    def test_each_file_by_name_and_all_at_once(self, tmp_path):
        self.put_strangers(tmp_path)
        beginnings = [
            *("blank.png: contains no ink", "cut.png: cannot be read"),
            "drawing.svg: cannot be read (neither PNG nor JPEG nor WEBP)",
            *("empty.jpg: cannot be read (neither", "film.png: cannot be read (neither"),
            "more: cannot be read (Is a directory)",
        ]
        for found, beginning in zip(problems(read_pictures, tmp_path), beginnings, strict=True):
            assert found.startswith(f"--input {tmp_path}/{beginning}")
        for name in ("blank.png", "cut.png"):  # a named file is never skipped
            assert name in problem(read_pictures, tmp_path / name)

    def test_beside_a_picture_they_are_skipped_with_a_remark(self, tmp_path):
        self.put_strangers(tmp_path)
        draw(tmp_path / "good.png", stroke())
        (tmp_path / "last.txt").touch()
        read = read_pictures(tmp_path)
        assert read.sources == ["good.png"]
        assert read.remarks == [
            "Skipped 1 of 8 files, which contain no ink: blank.png.",
            "Skipped 6 of 8 files, which cannot be read: "
            "cut.png, drawing.svg, empty.jpg, film.png, last.txt and 1 more.",
        ]

    def test_nothing_there(self, tmp_path, monkeypatch):
        assert "the folder is empty" in problem(read_pictures, tmp_path)
        for name in ("none.png", "none.npy"):
            with pytest.raises(UserError, match=f"{name}: .*No such file"):
                read_pictures(tmp_path / name)
        monkeypatch.setattr(own_pictures, "MOST_PICTURES", 1)
        for name in ("a.png", "b.png"):
            draw(tmp_path / name, stroke())
        assert "more than 1 files" in problem(read_pictures, tmp_path)

    @pytest.mark.parametrize(("width", "height"), [(10_000, 5_001), (100_000, 100_000)])
    def test_too_many_pixels(self, tmp_path, width, height):
        """The size in the header is enough; nothing is decoded."""

        def chunk(kind, content=b""):
            checksum = struct.pack(">I", zlib.crc32(kind + content))
            return struct.pack(">I", len(content)) + kind + content + checksum

        header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
        content = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT") + chunk(b"IEND")
        (tmp_path / "huge.png").write_bytes(content)
        assert "50,000,000 pixels at most" in problem(read_pictures, tmp_path / "huge.png")
