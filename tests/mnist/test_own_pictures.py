"""A user's pictures: what comes out of each kind, worked out by hand, and what is refused."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mnist import files as mnist_files
from mnist.own_pictures import read_pictures
from tests.mnist.test_training_form import enlarged, stroke
from tests.refusals import problem, problems

DIGITS = mnist_files.read_digits("test")[0]


def draw(path, pixels, mode=None, **options):
    image = Image.fromarray(np.asarray(pixels, np.uint8))
    (image.convert(mode) if mode else image).save(path, **options)
    return path


def test_a_folder_in_order_of_names_with_a_remark_for_each_kind(tmp_path):
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
        *((stroke(), mode, None) for mode in ("1", "P")),
        (np.where(stroke()[..., None] > 0, [0, 0, 120], [255, 255, 200]), None, "colours"),
        # Transparent is paper, whatever the colour of the ink is, and of what is not seen.
        (np.stack([np.zeros((28, 28))] * 3 + [stroke()], -1), None, "transparent pixels count"),
    ],
)
def test_modes(tmp_path, pixels, mode, remark):
    read = read_pictures(draw(tmp_path / "a.png", pixels, mode))
    assert np.array_equal(read.images[0], stroke())
    assert any(remark in each for each in read.remarks) if remark else not read.remarks


def test_sixteen_bits(tmp_path):
    deep, expected = stroke().astype(np.uint16) * 257, stroke()
    deep[9, 14], expected[9, 14] = 129 * 257 - 57, 129  # nearer to 129 than to 128
    Image.fromarray(deep).save(tmp_path / "deep.png")
    read = read_pictures(tmp_path / "deep.png")
    assert np.array_equal(read.images[0], expected)
    assert "16 bits" in read.remarks[0]


def test_turned_by_the_camera(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees when shown
    draw(tmp_path / "a.jpg", np.rot90(255 - enlarged(stroke(), 8)), exif=exif)
    ys, xs = np.nonzero(read_pictures(tmp_path / "a.jpg").images[0] > 64)
    assert [np.ptp(ys) + 1, np.ptp(xs) + 1] == [20, 8]


def test_names_break_nothing(tmp_path):
    """Neither messages nor the lines of predictions.csv nor a terminal."""
    for name in (b"a\nb.png", b"\x1b[2J.png", b"caf\xe9.png", b"=1+1.png", "é ü.png".encode()):
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        draw(path, stroke(), format="PNG")
    sources = read_pictures(tmp_path).sources
    assert sources == ["\\x1b[2J.png", "=1+1.png", "a\\nb.png", "caf\\udce9.png", "é ü.png"]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_arrays(tmp_path, dtype):
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
        (np.zeros((0, 28, 28), np.uint8), "shape (0, 28, 28)"),
        (np.full((2, 28, 28), 255.0), "values from 255 to 255"),
        (np.full((1, 28, 28), None), "allow_pickle=False"),
    ],
)
def test_arrays_that_are_refused(tmp_path, array, fault):
    np.save(tmp_path / "some.npy", array)
    said = problem(read_pictures, tmp_path / "some.npy")
    assert said.startswith(f"--input {tmp_path}/some.npy: cannot be read (")
    assert fault in said


def test_what_is_no_picture_is_skipped_beside_one(tmp_path):
    draw(tmp_path / "blank.png", np.full((30, 30), 255))
    draw(tmp_path / "cut.png", np.random.default_rng(0).integers(0, 255, (99, 99)))
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:3000])
    draw(tmp_path / "film.png", stroke(), format="GIF")
    (tmp_path / "more").mkdir()
    draw(tmp_path / "good.png", stroke())
    read = read_pictures(tmp_path)
    assert read.sources == ["good.png"]
    assert read.remarks == [
        "Skipped 1 of 5 files, which contain no ink: blank.png.",
        "Skipped 3 of 5 files, which cannot be read: cut.png, film.png, more.",
    ]
    assert "cut.png" in problem(read_pictures, tmp_path / "cut.png")  # never skipped if named
    (tmp_path / "good.png").unlink()
    assert len(problems(read_pictures, tmp_path)) == 4


def test_pictures_that_would_take_too_much_are_refused(tmp_path):
    Image.new("L", (20_001, 1)).save(tmp_path / "long.png")
    assert "20,001 x 1 pixels: scale it down" in problem(read_pictures, tmp_path / "long.png")
    Image.new("L", (30, 30)).save(tmp_path / "scans.jpg")
    with (tmp_path / "scans.jpg").open("ab") as file:
        file.write(1001 * b"\xff\xda")
    assert "more than 1,000 scans" in problem(read_pictures, tmp_path / "scans.jpg")
