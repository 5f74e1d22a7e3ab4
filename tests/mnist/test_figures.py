"""Figures can be read: no label covers another, one font for all."""

import io
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from mpl_toolkits.mplot3d.proj3d import proj_transform  # type: ignore[import-untyped]
from PIL import Image, ImageFont

from mnist import drawing
from mnist.figure_style import STYLE, font_file, to_png
from mnist.figures import latent_space


def latents(seed):
    """The figure of ten clusters at random places, drawn, and its axes."""
    random = np.random.default_rng(seed)
    labels = np.arange(300) % 10
    points = random.normal(0, 9, (10, 3))[labels] + random.normal(0, 2, (300, 3))
    figure = latent_space(points, labels)
    FigureCanvasAgg(figure).draw()
    return figure, *figure.axes


@pytest.mark.parametrize("seed", [3, 14, 16])
def test_no_name_covers_another_or_the_label_of_a_tick(seed):
    """Whatever the view, which depends on the middles of the classes."""
    axes: Any
    _, axes = latents(seed)
    view = axes.get_proj()
    names = [proj_transform(*text.get_position_3d(), view)[:2] for text in axes.texts]
    pairs = combinations(axes.transData.transform(names), 2)
    assert min(np.linalg.norm(a - b) for a, b in pairs) > 32  # pixels
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        name = axis.label.get_window_extent()
        ticks = [
            tick.label1.get_window_extent() for tick in axis.majorTicks if tick.label1.get_text()
        ]
        assert ticks
        assert not any(tick.overlaps(name) for tick in ticks)


def test_the_latent_space_fills_its_figure():
    figure, _ = latents(3)
    picture = np.asarray(Image.open(io.BytesIO(to_png(figure))).convert("L"))
    rows, columns = np.nonzero(picture < 250)
    height, width = picture.shape
    margins = (height - rows.max(), columns.min(), width - columns.max())
    assert 5 < min(margins) <= max(margins) < 0.16 * width


def test_captions_have_the_font_of_the_figures():
    font = ImageFont.truetype(font_file(), 14)
    assert font.getname()[0] == STYLE["font.family"]
    title = "A title that is wider than the image below"
    page = drawing.captioned(np.zeros((1, 8, 8), np.uint8), [[]], 1, 1, 14, title)
    assert page.shape[1] == round(font.getlength(title)) + 2 * 12
