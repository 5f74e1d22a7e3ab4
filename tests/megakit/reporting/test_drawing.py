"""Small pictures, looked at pixel by pixel."""

import numpy as np

from megakit.reporting import drawing
from megakit.reporting.figure_style import GOOD

BLUE = tuple(int(GOOD[i : i + 2], 16) for i in (1, 3, 5))


def test_rows_of_images():
    above = np.full((2, 3, 3), 200, np.uint8)
    below = np.full((2, 3, 3), 100, np.uint8)
    picture = drawing.rows_of_images([above, below], scale=2, gap=2)
    assert picture.shape == (2 * 2 * 5, 2 * 2 * 5, 3)
    assert (picture[2:8, 2:8] == 200).all()
    assert (picture[2:8, 12:18] == 200).all()
    assert (picture[12:18, 2:8] == 100).all()
    assert (picture[:2] == 0).all()


def cells(picture, num_classes):
    """The colour of each cell of a confusion matrix, in its corner, where no number is."""
    size = 33
    top, left = picture.shape[0] - num_classes * size, picture.shape[1] - num_classes * size
    return [
        [tuple(picture[top + row * size + 1, left + column * size + 1]) for column in range(3)]
        for row in range(num_classes)
    ]


def test_confusion_matrix():
    label = np.array([0] * 4 + [1] * 4 + [2] * 4)
    prediction = np.array([0, 0, 0, 0, 1, 1, 1, 2, 0, 0, 0, 0])
    found = cells(drawing.confusion_matrix(label, prediction, 3), 3)
    white = (255, 255, 255)
    assert found[0] == [BLUE, white, white]
    assert found[2] == [BLUE, white, white]
    assert found[1][0] == white
    assert white > found[1][2] > found[1][1] > BLUE


def test_confusion_matrix_of_a_class_that_does_not_occur():
    label = np.array([0, 0, 2])
    found = cells(drawing.confusion_matrix(label, label, 3), 3)
    assert found[1] == [(255, 255, 255)] * 3


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
