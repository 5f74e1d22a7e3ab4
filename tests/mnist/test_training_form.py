"""The form of training images: what comes out of each picture, worked out by hand."""

import numpy as np
import pytest

from mnist import files as mnist_files
from mnist.training_form import to_training_form

DIGITS = mnist_files.read_digits("test")[0]


def stroke(height=28, width=28, paper=0, ink=255, rows=slice(5, 25), columns=slice(11, 19)):
    """A picture with one rectangle of ink; by default 20 x 8, placed as `to_training_form` does."""
    pixels = np.full((height, width), paper, np.uint8)
    pixels[rows, columns] = ink
    return pixels


def enlarged(pixels, scale):
    return np.kron(pixels, np.ones((scale, scale), np.uint8))


def test_what_has_it_stays():
    off_center = stroke(rows=slice(0, 5), columns=slice(0, 3))
    for image in (*DIGITS, off_center):
        assert to_training_form(image) is image


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        # Ink becomes 255 and paper 0, whichever is the brighter, however little they differ.
        (stroke(paper=230, ink=30), stroke()),
        (stroke(paper=90, ink=122), stroke()),
        # A 5 x 2 rectangle on 9 x 9: four times as large it is 20 x 8.
        (stroke(9, 9, rows=slice(0, 5), columns=slice(3, 5)), stroke()),
        # The longer side becomes 20; the shorter, 30 of 400 pixels, becomes 1.5 and so 2.
        (
            stroke(200, 500, 255, 0, rows=slice(50, 80), columns=slice(60, 460)),
            stroke(rows=slice(14, 16), columns=slice(5, 25)),
        ),
        # A thin line stays: its width, a hundredth of its length, becomes one pixel.
        (
            stroke(120, 120, rows=slice(10, 110), columns=slice(60, 61)),
            stroke(columns=slice(14, 15)),
        ),
    ],
)
def test_by_hand(picture, expected):
    assert np.array_equal(to_training_form(picture), expected)


def test_centre_of_mass():
    """An L: a column 4 wide and 20 high on the left, a foot 4 high and 12 wide."""
    letter = np.zeros((300, 300), np.uint8)
    letter[100:300, 0:40] = 255
    letter[260:300, 0:120] = 255
    ys, xs = np.nonzero(to_training_form(letter))
    assert [np.ptp(ys) + 1, np.ptp(xs) + 1] == [20, 12]
    assert (ys.mean(), xs.mean()) == pytest.approx((14, 14), abs=0.5)
