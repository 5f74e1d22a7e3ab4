"""Draws a training and the results of a classifier with matplotlib; the first figure imports it.

A figure is a `matplotlib.figure.Figure`. Notebooks show figures, and `to_png` converts them to
files. pyplot is not used, because pyplot stores figures and searches for a display.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megakit.training.metrics_csv import Metrics, further_columns, in_words
from mnist.figure_style import BAD, CLASS_COLORS, GOOD, figure_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curves(rows: Sequence[Metrics], title: str) -> Figure:
    """Draws losses over steps; below, further values (if any) and the learning rate."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    further = further_columns(rows)
    parts = [["train_loss", "val_loss"], *([further] if further else []), ["lr"]]
    with figure_style():
        figure = Figure(layout="constrained")
        areas = figure.subplots(len(parts), sharex=True, height_ratios=(3, 1, 1)[: len(parts)])
        for axes, columns in zip(areas, parts, strict=True):
            for column, color in zip(columns, (GOOD, BAD, *CLASS_COLORS), strict=False):
                points = [(row.step, value) for row in rows if (value := row[column]) is not None]
                steps, values = np.reshape(points, (-1, 2)).T
                line = "o-" if column.startswith("val_") else "-"
                axes.plot(steps, values, line, color=color, ms=4, label=in_words(column))
            axes.legend()
        areas[0].set(title=title, yscale="log")
        areas[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        areas[0].yaxis.set_major_formatter("{x:g}")
        areas[0].minorticks_off()
        areas[-1].set_xlabel("step")
    return figure


def confusion_matrix(counts: NDArray[np.int64]) -> Figure:
    """Draws how often each label (row) got each prediction (column), from counts (K, K)."""
    from matplotlib.figure import Figure

    digits, is_right = np.arange(len(counts)), np.eye(len(counts), dtype=bool)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    # Right predictions are blue, mistakes red. Mistakes are few: a colour scale of their own makes
    # a few percent visible.
    most = max(shares[~is_right].max(), 1e-9)
    shades = np.where(is_right, 0.85 * shares, -0.55 * shares / most)
    with figure_style():
        figure = Figure(layout="constrained")
        axes = figure.subplots()
        axes.grid(visible=False)
        axes.pcolormesh(digits, digits, shades, cmap="RdBu", vmin=-1, vmax=1, edgecolors="white")
        center: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 12}
        for (row, column), count in np.ndenumerate(counts):
            color = "white" if shades[row, column] > 0.6 else "black"
            axes.text(column, row, str(count or ""), color=color, **center)
        for row, share in enumerate(shares.diagonal()):
            axes.text(len(counts) + 0.2, row, f"{share:.1%}", **center)
        axes.set(xticks=digits, yticks=digits, xlabel="predicted", ylabel="label")
        axes.set_title(f"{counts.trace():,} of {counts.sum():,} predicted right")
        axes.invert_yaxis()
    return figure


def clear_view(
    latent: NDArray[Any], labels: NDArray[np.int64]
) -> tuple[NDArray[np.float64], dict[int, NDArray[np.float64]], NDArray[np.float64]]:
    """Prepares a view of a model's latent space in 3 dimensions.

    Returns:
        The first 3 dimensions of the points (N, D), of which missing ones are 0; the median of the
        points of each class; and the direction from which the nearest two medians look farthest
        apart. No direction is along an axis: the numbers at its ticks would cover each other.
    """
    points = latent[:, :3].astype(np.float64)
    points = np.pad(points, ((0, 0), (0, 3 - points.shape[1])))
    middles = {k: np.median(points[labels == k], axis=0) for k in np.unique(labels).tolist()}
    views = np.array([(x, y, 1.0) for x in (-2, -1, 1, 2) for y in (-2, -1, 1, 2)])
    views /= np.linalg.norm(views, axis=1, keepdims=True)
    pairs = np.array([a - b for a, b in combinations(middles.values(), 2)])
    seen = np.cross((pairs / np.maximum(points.std(axis=0), 1e-9))[:, None], views)
    return points, middles, views[np.linalg.norm(seen, axis=2).min(axis=0).argmax()]


def latent_space(points: NDArray[Any], labels: NDArray[np.int64]) -> Figure:
    """Draws the samples (N, D) in a model's latent space by class, from a clear view.

    The figure shows the first 3 dimensions.
    """
    from matplotlib.figure import Figure

    points, middles, (x, y, z) = clear_view(points, labels)
    # Outliers are left out: they would compress the rest, or cover the labels of the axes.
    low, high = np.percentile(points, (0.2, 99.8), axis=0)
    high = np.maximum(high, low + 1e-9)
    is_inside = ((points >= low) & (points <= high)).all(axis=1)
    with figure_style():
        figure = Figure()
        axes: Any = figure.add_axes((0.0, 0.0, 1.0, 1.0), projection="3d")
        axes.view_init(elev=np.degrees(np.arcsin(z)), azim=np.degrees(np.arctan2(y, x)))
        axes.set_box_aspect((1, 1, 1), zoom=0.87)
        axes.computed_zorder = False  # otherwise, points hide class names
        colors = np.array(CLASS_COLORS)[labels[is_inside]]
        area = 300 / len(points) ** 0.5  # fewer points are larger
        axes.scatter(*points[is_inside].T, s=area, c=colors, linewidths=0, depthshade=False)
        for label, middle in middles.items():
            box = {"boxstyle": "circle,pad=0.2", "fc": "white", "ec": CLASS_COLORS[label], "lw": 2}
            center = {"ha": "center", "va": "center", "zorder": 9}
            axes.text(*middle, str(label), weight="bold", bbox=box, **center)
        for number, name in enumerate("xyz"):
            getattr(axes, f"set_{name}lim")(low[number], high[number])
            # A smaller distance may put the name on the label of a tick.
            getattr(axes, f"set_{name}label")(f"z {number + 1}", labelpad=12)
    return figure
