"""Figures can be read: no label covers another, and each number is in its place."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from mpl_toolkits.mplot3d.proj3d import proj_transform  # type: ignore[import-untyped]

from megakit.training.metrics_csv import Metrics
from megakit.training.predicted_classes import Predictions
from mnist import drawing, figures


@pytest.mark.parametrize("seed", [3, 14, 16])
def test_no_name_covers_another_or_the_label_of_a_tick(seed: int) -> None:
    """Whatever the view, which depends on the middles of the classes."""
    random = np.random.default_rng(seed)
    labels = np.arange(300) % 10
    points = random.normal(0, 9, (10, 3))[labels] + random.normal(0, 2, (300, 3))
    figure = figures.latent_space(points, labels)
    FigureCanvasAgg(figure).draw()
    axes: Any = figure.axes[0]
    names = [proj_transform(*text.get_position_3d(), axes.get_proj())[:2] for text in axes.texts]
    pairs = combinations(axes.transData.transform(names), 2)
    assert min(np.linalg.norm(a - b) for a, b in pairs) > 24  # pixels
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        name = axis.label.get_window_extent()
        labels_of_ticks = [tick.label1 for tick in axis.majorTicks if tick.label1.get_text()]
        assert labels_of_ticks
        assert not any(each.get_window_extent().overlaps(name) for each in labels_of_ticks)


def test_a_latent_space_of_two_dimensions_is_seen_from_any_side() -> None:
    points, middles, direction = figures.clear_view(np.eye(2, dtype=np.float32), np.arange(2))
    assert points.tolist() == [[1, 0, 0], [0, 1, 0]]
    assert middles[1].tolist() == [0, 1, 0]
    assert np.isfinite(direction).all()
    figures.latent_space(np.eye(2), np.arange(2))


def test_a_confusion_matrix() -> None:
    """Of labels 0, 0, 0, 1, 1, 2; class 3 does not occur."""
    counts = np.array([[2, 0, 1, 0], [0, 2, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    (axes,) = figures.confusion_matrix(counts).axes
    at = {text.get_position(): text.get_text() for text in axes.texts if text.get_text()}
    # (predicted, label): a column, and a row
    expected = {(0, 0): "2", (2, 0): "1", (1, 1): "2", (1, 2): "1"}
    shares = ("66.7%", "100.0%", "0.0%", "0.0%")
    assert at == expected | {(4.2, row): share for row, share in enumerate(shares)}
    assert axes.get_title(loc="left") == "4 of 6 predicted right"


def test_curves_show_what_was_measured() -> None:
    rows = [Metrics(1, 8, 2.0, None, 0.1), Metrics(2, 16, None, 1.5, values={"val_top_5": 0.5})]
    found = {
        line.get_label(): np.asarray(line.get_xydata()).tolist()
        for axes in figures.curves(rows, "Losses").axes
        for line in axes.lines
    }
    assert found == {
        "training loss": [[1, 2.0]],
        "validation loss": [[2, 1.5]],
        "validation top 5": [[2, 0.5]],
        "learning rate": [[1, 0.1]],
    }
    assert len(figures.curves(rows[:1], "Without a validation").axes[0].lines) == 2


def test_each_mistake_is_shown_in_its_place_and_no_text_is_wider() -> None:
    images = np.stack([np.full((10, 10), 255 - shade, np.uint8) for shade in (40, 80, 120)])
    worst = Predictions(np.arange(3), np.array([1, 2, 0]), np.eye(3))
    title = "A title that is wider than the images below"
    picture = drawing.mistakes(images, worst, columns=2, scale=6, title=title)
    masks = [(picture == shade).all(axis=2) for shade in (40, 80, 120)]
    first, second, third = (np.argwhere(mask)[0].tolist() for mask in masks)
    assert first[0] == second[0] < third[0]
    assert first[1] == third[1] < second[1]
    assert [int(mask.sum()) for mask in masks] == [3600] * 3
    image = drawing.captioned(images[:1], [[("a long name of a picture", "black")]], 1, 6, 11)
    assert (image[:, 74:] == 255).all()
