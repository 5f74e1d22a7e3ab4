"""Figures and pictures, by what they show: their texts, their colours, their pixels."""

import io

import numpy as np
import pytest
from PIL import Image

from megakit.reporting import drawing, figures
from megakit.reporting.figure_style import CLASS_COLORS, to_png


def test_confusion_matrix():
    """Of labels 0, 0, 0, 1, 1, 2; class 3 does not occur."""
    counts = np.array([[2, 0, 1, 0], [0, 2, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    (axes,) = figures.confusion_matrix(counts).axes
    at = {text.get_position(): text.get_text() for text in axes.texts}
    shown = {place: text for place, text in at.items() if max(place) < 3.5 and text.isdigit()}
    # (predicted, label): a column, and a row
    assert shown == {(0, 0): "2", (2, 0): "1", (1, 1): "2", (1, 2): "1"}
    assert [at[3.6, row] for row in range(4)] == ["66.7%", "100.0%", "0.0%", "none"]
    assert axes.get_title(loc="left") == "66.67% of 6 predicted right"


@pytest.mark.parametrize("dimensions", [2, 16])
def test_classes_have_names_and_colours_in_latent_space(dimensions):
    rng = np.random.default_rng(0)
    labels = np.arange(10).repeat(20)
    points = (rng.normal(size=(10, dimensions)) * 20)[labels] + rng.normal(size=(200, dimensions))
    figure = figures.latent_space(points, labels)
    assert {text.get_text() for text in figure.axes[0].texts} >= set("0123456789")
    image = np.asarray(Image.open(io.BytesIO(to_png(figure))).convert("RGB"))
    shown = {tuple(color) for color in image.reshape(-1, 3).tolist()}
    assert {tuple(bytes.fromhex(color[1:])) for color in CLASS_COLORS} <= shown


def test_rows_of_images():
    above, below = (np.full((2, 3, 3), shade, np.uint8) for shade in (200, 100))
    picture = drawing.rows_of_images([above, below], scale=2, gap=2)
    assert picture.shape == (2 * 2 * 5, 2 * 2 * 5, 3)
    assert (picture[2:8, 2:8] == 200).all()
    assert (picture[2:8, 12:18] == 200).all()
    assert (picture[12:18, 2:8] == 100).all()
    assert (picture[:2] == 0).all()


def test_each_mistake_is_shown_in_its_place():
    images = np.stack([np.full((4, 4), shade, np.uint8) for shade in (40, 80, 120)])
    numbers = np.array([1, 2, 3])
    picture = drawing.mistakes(images, numbers, numbers[::-1], np.array([0.9, 0.8, 0.7]), columns=2)
    masks = [(picture == shade).all(axis=2) for shade in (40, 80, 120)]
    first, second, third = (np.argwhere(mask)[0].tolist() for mask in masks)
    assert first[0] == second[0] < third[0]
    assert first[1] == third[1] < second[1]
    assert [int(mask.sum()) for mask in masks] == [64] * 3


def test_images_of_any_range_become_dark_on_light():
    images = np.stack([np.array([[0.0, 0.5, 1.0]]), np.array([[-3.0, 1.0, 5.0]]), np.zeros((1, 3))])
    assert drawing.dark_on_light(images)[:2].tolist() == [[[255, 128, 0]]] * 2
    assert np.ptp(drawing.dark_on_light(images)[2]) == 0
