"""A user's pictures: what comes out of each kind, what is refused, and what is shown."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megakit.training.predicted_classes import Predictions
from mnist import files as mnist_files
from mnist.inputs import write_inputs
from mnist.own_pictures import read_pictures, to_training_form
from tests.refusals import problem

DIGITS = mnist_files.read_digits("test")[0]
#: A bar of ink, as MNIST has it: 20 x 4, with its centre at the centre of 28x28.
BAR = np.zeros((28, 28), np.uint8)
BAR[5:25, 12:16] = 255
Y, X = np.mgrid[:240, :320] / 320
IS_BAR = (abs(X - 0.5) < 0.025) & (abs(Y - 0.375) < 0.125)
NOISE = np.random.default_rng(0).normal(0, 2, X.shape)
LIGHT = 230 - 90 * X
GRID = np.minimum(np.arange(320) % 40, np.arange(240)[:, None] % 40) < 2


def draw(path, pixels, mode=None, **options):
    image = Image.fromarray(np.asarray(pixels, np.uint8))
    (image.convert(mode) if mode else image).save(path, **options)
    return path


def assert_is_bar(image):
    ys, xs = np.nonzero(image > 127)
    assert [np.ptp(ys), np.ptp(xs)] == [19, 3]
    assert (ys.mean(), xs.mean()) == pytest.approx((14, 14), abs=0.6)


def test_what_has_the_form_of_mnist_stays():
    corner = np.roll(BAR, (-5, -11), (0, 1))
    for image in (*DIGITS, corner):
        assert to_training_form(image) is image


@pytest.mark.parametrize(
    "picture",
    [
        255 - BAR,
        np.where(IS_BAR, 0.3, 1) * LIGHT + NOISE,
        np.where(IS_BAR, 200, 50) + NOISE,
        np.where(IS_BAR, 0.3, 1) * np.where(X + Y > 1, 130, 230) + NOISE,
        np.where(IS_BAR, 0.2, np.where(GRID, 0.75, 1)) * LIGHT + NOISE,
        np.where((Y < 0.05) | (X > 0.9), 60, np.where(IS_BAR, 0.2, 1) * LIGHT) + NOISE,
        np.where(IS_BAR | (np.hypot(X - 0.1, Y - 0.1) < 0.02), 40, 230),
        np.where(IS_BAR & (abs(Y - 0.4) > 0.004), 40, 230),
    ],
    ids=["dark", "light", "chalk", "shadow", "squared", "table", "spot", "gap"],
)
def test_a_digit_on_paper(picture):
    grey = np.clip(picture, 0, 255).astype(np.uint8)
    for scale in (1, 3):
        assert_is_bar(to_training_form(grey.repeat(scale, 0).repeat(scale, 1)))


@pytest.mark.parametrize("paper", [255 + 0 * X, 0 * X, LIGHT + NOISE, 50 + NOISE])
def test_an_empty_sheet_has_no_ink(tmp_path, paper):
    path = draw(tmp_path / "a.png", np.clip(paper, 0, 255))
    assert problem(read_pictures, path).startswith(f"--input {path}: cannot be read (contains no")


@pytest.mark.parametrize(
    ("pixels", "mode"),
    [
        (BAR, "P"),
        (np.where(BAR[..., None] > 0, [0, 0, 120], [255, 255, 200]), None),
        # What is transparent is paper, whatever the colour of the ink is.
        (np.stack([0 * BAR, 0 * BAR, 0 * BAR, BAR], -1), None),
        (np.stack([BAR, BAR, BAR, BAR], -1), None),
    ],
)
def test_colours(tmp_path, pixels, mode):
    assert_is_bar(read_pictures(draw(tmp_path / "a.png", pixels, mode)).images[0])


def test_sixteen_bits(tmp_path):
    Image.fromarray(DIGITS[0].astype(np.uint16) * 257).save(tmp_path / "deep.png")
    assert np.array_equal(read_pictures(tmp_path / "deep.png").images[0], DIGITS[0])


def test_turned_by_the_camera(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees when shown
    turned = np.rot90(255 - BAR.repeat(8, 0).repeat(8, 1))
    assert_is_bar(read_pictures(draw(tmp_path / "a.jpg", turned, exif=exif)).images[0])


def test_a_folder_in_order_of_names_with_what_was_skipped(tmp_path):
    for name in (b"2.png", b"a\nb.png", b"\x1b[2J.png", b"caf\xe9.png", "é ü.png".encode()):
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        draw(path, DIGITS[0], format="PNG")
    draw(tmp_path / "1.png", 255 - BAR)
    draw(tmp_path / "blank.png", 255 + 0 * BAR)
    draw(tmp_path / "film.png", BAR, format="GIF")
    (tmp_path / "cut.png").write_bytes((tmp_path / "2.png").read_bytes()[:99])
    (tmp_path / "more").mkdir()
    (tmp_path / ".DS_Store").write_bytes(b"hidden")
    read = read_pictures(tmp_path)
    assert read.sources == [
        *("\\x1b[2J.png", "1.png", "2.png", "a\\nb.png", "caf\\udce9.png", "é ü.png")
    ]
    assert np.array_equal(read.images[2], DIGITS[0])
    assert read.remarks == [
        "Pictures converted to the form of MNIST: 1 of 6.",
        "Skipped, no picture or no ink: blank.png, cut.png, film.png, more",
    ]
    assert "cut.png" in problem(read_pictures, tmp_path / "cut.png")  # never skipped if named
    assert "no picture is in it" in problem(read_pictures, tmp_path / "more")


def test_a_picture_that_would_take_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    path = draw(tmp_path / "a.png", np.zeros((50, 50)))
    assert f"--input {path}: cannot be read (DecompressionBomb" in problem(read_pictures, path)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_arrays(tmp_path, dtype):
    np.save(tmp_path / "some.npy", DIGITS[:3] if dtype == np.uint8 else (DIGITS[:3] / dtype(255)))
    read = read_pictures(tmp_path / "some.npy")
    assert np.array_equal(read.images, DIGITS[:3])
    assert read.sources == ["some.npy[0]", "some.npy[1]", "some.npy[2]"]
    assert read.labels.tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("array", "fault"),
    [
        (np.zeros((0, 28, 28), np.uint8), "no picture is in it"),
        (np.zeros((2, 20, 28), np.uint8), "shape (2, 20, 28)"),
        (np.full((2, 28, 28), 255.0), "float64 from 255.0 to 255.0"),
        (np.full((1, 28, 28), None), "allow_pickle=False"),
    ],
)
def test_arrays_that_are_refused(tmp_path, array, fault):
    np.save(tmp_path / "some.npy", array)
    said = problem(read_pictures, tmp_path / "some.npy")
    assert said.startswith(f"--input {tmp_path}/some.npy: cannot be read (")
    assert fault in said


def test_what_the_classifier_saw(tmp_path):
    """An unsure answer is red; of many pictures, the first are drawn."""
    images, sources = np.stack([BAR] * 70), [f"{number}.png" for number in range(70)]
    path, red = tmp_path / "inputs.png", []
    for share in (0.91, 0.6):
        shares = np.full((70, 10), 0.01)
        shares[:3, 4] = share
        shares[3:, 4] = 0.91
        said = write_inputs(
            path, Predictions(np.arange(70), np.full(70, -1), shares), images, sources
        )
        told = "" if share > 0.7 else "\nunsure answers (?): 3; one digit on plain paper works best"
        assert said == f"{path}{told}"
        pixels = np.asarray(Image.open(path), int)
        red.append(int((pixels[..., 0] - pixels[..., 1] > 100).sum()))
    assert red[0] == 0 < red[1]
