"""The latent space can be read: no label covers another, and no two colours look alike."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from megakit.reporting.figure_style import CLASS_COLORS
from megakit.reporting.figures import latent_space


@pytest.mark.parametrize("seed", [0, 20, 26])
def test_no_name_covers_the_label_of_a_tick(seed):
    """Whatever the view, which depends on the spread of the points."""
    random = np.random.default_rng(seed)
    labels = np.arange(300) % 10
    points = random.normal(0, 3, (300, 3)) @ random.normal(0, 5, (3, 3)) + 20
    figure = latent_space(points, labels)
    FigureCanvasAgg(figure).draw()
    axes: Any
    (axes,) = figure.axes
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        name = axis.label.get_window_extent()
        ticks = [
            tick.label1.get_window_extent() for tick in axis.majorTicks if tick.label1.get_text()
        ]
        assert ticks
        assert not any(tick.overlaps(name) for tick in ticks)


def to_lab(color):
    """The colour in CIELAB, where distances are about what a reader sees."""
    share = np.array(to_rgb(color))
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4339, 0.3762, 0.1899], [0.2127, 0.7152, 0.0722], [0.0178, 0.1095, 0.8727]]
    x, y, z = np.cbrt(to_xyz @ linear)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colors_differ():
    colors = [to_lab(color) for color in CLASS_COLORS]
    assert min(np.linalg.norm(a - b) for a, b in combinations(colors, 2)) > 25
    assert all(25 < color[0] < 75 for color in colors)
