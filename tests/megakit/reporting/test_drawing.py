"""Small pictures, looked at pixel by pixel."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megakit.reporting import drawing


def test_rows_of_images():
    above = np.full((2, 3, 3), 200, np.uint8)
    below = np.full((2, 3, 3), 100, np.uint8)
    picture = drawing.rows_of_images([above, below], scale=2, gap=2)
    assert picture.shape == (2 * 2 * 5, 2 * 2 * 5, 3)
    assert (picture[2:8, 2:8] == 200).all()
    assert (picture[2:8, 12:18] == 200).all()
    assert (picture[12:18, 2:8] == 100).all()
    assert (picture[:2] == 0).all()


def test_images_are_shrunk_as_little_as_needed():
    images = np.arange(2 * 30 * 61).reshape(2, 30, 61)
    assert [drawing.shrunk(images, n).shape for n in (100, 61, 60, 31, 20)] == [
        *((2, 30, 61), (2, 30, 61), (2, 15, 31), (2, 15, 31), (2, 8, 16))
    ]
    assert drawing.shrunk(images, 60)[1, 1, 1] == images[1, 2, 2]


def test_mistakes_show_each_image():
    images = np.stack([np.full((4, 4), shade, np.uint8) for shade in (40, 80, 120)])
    numbers = np.array([1, 2, 3])
    picture = drawing.mistakes(images, numbers, numbers[::-1], np.array([0.9, 0.8, 0.7]), columns=2)
    shades = {int(shade) for shade in picture[..., 0][np.ptp(picture, axis=2) == 0]}
    assert {40, 80, 120, 255} <= shades
    first, second, third = (
        np.flatnonzero((picture == shade).all(axis=2).any(axis=1))[0] for shade in (40, 80, 120)
    )
    assert first == second < third


def test_a_title_stands_above_the_images():
    image = np.full((1, 28, 28), 40, np.uint8)
    numbers, share = np.array([1]), np.array([0.99999])
    plain = drawing.mistakes(image, numbers, numbers, share, scale=6)
    titled = drawing.mistakes(image, numbers, numbers, share, scale=6, title="1 of 7 mistakes")
    added = len(titled) - len(plain)
    assert added > 20
    assert np.array_equal(titled[added + 30 :], plain[30:])
    assert np.ptp(titled[: added + 15].astype(int)) > 200


def test_images_of_any_range_become_dark_on_light():
    images = np.stack([np.array([[0.0, 0.5, 1.0]]), np.array([[-3.0, 1.0, 5.0]]), np.zeros((1, 3))])
    assert drawing.dark_on_light(images)[:2].tolist() == [[[255, 128, 0]]] * 2
    assert np.ptp(drawing.dark_on_light(images)[2]) == 0


def test_png_comes_back_exactly():
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(drawing.to_png(picture)))), picture)


@pytest.mark.parametrize(("dtype", "most"), [(np.uint8, 200), (np.bool_, 1), (np.float32, 0.5)])
def test_the_maximum_becomes_black(dtype: type, most: float):
    images: Any = np.full((1, 2, 2), most, dtype)
    images[0, 0, 0] = images[0, 1, 1] = 0
    assert drawing.dark_on_light(images).tolist() == [[[255, 0], [0, 255]]]
