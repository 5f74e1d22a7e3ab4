"""Small pictures, looked at pixel by pixel."""

import numpy as np

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


def test_images_of_any_range_become_dark_on_light():
    images = np.stack([np.array([[0.0, 0.5, 1.0]]), np.array([[-3.0, 1.0, 5.0]]), np.zeros((1, 3))])
    assert drawing.dark_on_light(images)[:2].tolist() == [[[255, 128, 0]]] * 2
    assert np.ptp(drawing.dark_on_light(images)[2]) == 0
