"""Draws the results of a classifier, and two runs, with matplotlib; the first figure imports it.

A figure is a `matplotlib.figure.Figure`. Notebooks show figures, and `to_png` converts them to
files. pyplot is not used, because pyplot stores figures and searches for a display.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megakit.training.metrics_csv import Metrics, in_words
from mnist.figure_style import BAD, DEEP, GOOD, class_color, figure_style, shares_of_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def confusion_matrix(counts: NDArray[np.int64]) -> Figure:
    """Draws how often each label (row) got each prediction (column), from counts (K, K)."""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    num_classes, shares = len(counts), shares_of_rows(counts)
    # Mistakes are few. A colour scale of their own makes a few percent visible.
    is_right = np.eye(num_classes, dtype=bool)
    mistakes = np.where(is_right, 0, shares)
    faint = 0.6 * (mistakes / max(mistakes.max(), 1e-9)) ** 0.75
    strength = np.where(is_right, shares, faint)[..., None]
    colors = np.where(is_right[..., None], to_rgb(GOOD), to_rgb(BAD))
    with figure_style():
        figure = Figure((8, 7.2))
        axes = figure.add_axes((0.09, 0.09, 0.8, 0.8))
        axes.imshow(1 - strength * (1 - colors), aspect="auto")
        style: dict[str, Any] = {"va": "center", "fontsize": 10}
        for (row, column), count in np.ndenumerate(counts):
            if count:
                color = "white" if strength[row, column] >= DEEP else "black"
                axes.text(column, row, f"{count:,}", ha="center", color=color, **style)
        for row, total in enumerate(counts.sum(axis=1)):
            right = f"{shares[row, row]:.1%}" if total else "none"
            axes.text(num_classes - 0.4, row, right, **style)
        axes.text(num_classes - 0.4, -0.75, "right", **style)
        between = np.arange(num_classes + 1) - 0.5
        axes.set_xticks(between, minor=True)
        axes.set_yticks(between, minor=True)
        axes.grid(which="minor")
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
        accuracy = np.trace(counts) / max(counts.sum(), 1)
        axes.set(
            xticks=range(num_classes),
            yticks=range(num_classes),
            xlabel="predicted",
            ylabel="label",
            title=f"{accuracy:.2%} of {counts.sum():,} predicted right",
        )
    return figure


def clear_view(middles: Iterable[Any], extent: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the direction from which the nearest two of some points look farthest apart.

    No direction is along an axis: the numbers at its ticks would cover each other.

    Args:
        middles: The points (3,).
        extent: What each axis of the figure, a cube, shows.
    """
    sides = (-2, -1, 1, 2)
    views = np.array([(x, y, 1.0) for x in sides for y in sides])
    views /= np.linalg.norm(views, axis=1, keepdims=True)
    scaled = np.stack([*middles]) / np.maximum(extent, 1e-9)
    first, second = np.triu_indices(len(scaled), 1)
    seen = np.linalg.norm(np.cross((scaled[first] - scaled[second])[:, None], views), axis=2)
    return views[seen.min(axis=0, initial=np.inf).argmax()]


def latent_space(points: NDArray[Any], labels: NDArray[np.int64]) -> Figure:
    """Draws the samples in a model's latent space by class, from a clear view.

    Args:
        points: The points (N, D), with D at least 2. If D is above 3, the figure shows the 3
            directions of largest spread.
        labels: The classes (N,).

    Raises:
        ValueError: D is less than 2.
    """
    from matplotlib.figure import Figure

    points = np.asarray(points, np.float64)
    if points.shape[1] < 2:
        raise ValueError(f"points of shape {points.shape}: a picture takes at least 2 dimensions.")
    axis_name = "z"
    if points.shape[1] > 3:
        axis_name, centered = "direction", points - points.mean(axis=0)
        points = points @ np.linalg.eigh(centered.T @ centered).eigenvectors[:, :-4:-1]
    is_solid = points.shape[1] == 3
    # Outliers are left out: they would compress the rest, or cover the labels of the axes.
    low, high = np.percentile(points, (0.2, 99.8), axis=0)
    is_inside = ((points >= low) & (points <= high)).all(axis=1)
    middles = {label: np.median(points[labels == label], axis=0) for label in np.unique(labels)}
    with figure_style():
        figure = Figure((8, 7.6))
        figure.suptitle("Latent space", x=0.03, y=0.96, ha="left", weight="bold", size=14)
        if is_solid:
            axes: Any = figure.add_axes((0.0, 0.0, 1.0, 1.0), projection="3d")
            x, y, z = clear_view(middles.values(), high - low)
            axes.view_init(elev=np.degrees(np.arcsin(z)), azim=np.degrees(np.arctan2(y, x)))
            axes.set_box_aspect((1, 1, 1), zoom=0.9)
            axes.computed_zorder = False  # otherwise, points hide class names
        else:
            axes = figure.add_axes((0.1, 0.1, 0.84, 0.8))
        colors = [class_color(label) for label in labels[is_inside]]
        area = np.clip(30_000 / max(len(points), 1), 5, 40)  # fewer points are larger
        flat = {"depthshade": False} if is_solid else {}
        axes.scatter(*points[is_inside].T, s=area, c=colors, linewidths=0, **flat)
        for label, middle in middles.items():
            box = {"boxstyle": "circle,pad=0.25", "fc": "white", "ec": class_color(label), "lw": 2}
            style = {"ha": "center", "va": "center", "weight": "bold", "zorder": 9}
            axes.text(*middle, str(label), bbox=box, **style)
        for number, axis in enumerate("xyz"[: points.shape[1]]):
            if low[number] < high[number]:
                getattr(axes, f"set_{axis}lim")(low[number], high[number])
            pad = 12 if is_solid else 4  # in a solid, 4 may put the name on the label of a tick
            getattr(axes, f"set_{axis}label")(f"{axis_name} {number + 1}", labelpad=pad)
    return figure


def two_runs(
    runs: Iterable[tuple[str, Sequence[Metrics]]],
    differences: Mapping[str, Mapping[int, float]],
    limits: Mapping[str, float],
    last_step: int,
) -> Figure:
    """Draws the losses of two runs by name, and below them the relative differences by column.

    Dotted lines show the limits, which grow with the step, up to `last_step`.
    """
    from matplotlib.figure import Figure

    with figure_style():
        figure = Figure((8, 8), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        for (name, rows), color, line in zip(runs, (GOOD, BAD), ("-", "--"), strict=True):
            for column, marker in (("train_loss", ""), ("val_loss", "o")):
                points = [(row.step, y) for row in rows if (y := row[column]) is not None]
                label = f"{in_words(column)}, {name}"
                style: dict[str, Any] = {"color": color, "label": label, "markersize": 4}
                above.plot([x for x, _ in points], [y for _, y in points], line + marker, **style)
        for column, color in (("train_loss", GOOD), ("grad_norm", BAD)):
            # A logarithmic axis has no place for equal values.
            shown = {step: value for step, value in differences[column].items() if value}
            name = in_words(column)
            below.plot([*shown], [*shown.values()], "o-", color=color, label=name, markersize=4)
            limit = (limits[column], limits[column] * last_step)
            below.plot((1, last_step), limit, ":", color=color, label=f"limit of the {name}")
        above.set(title="Two runs", ylabel="loss", xscale="log", yscale="log")
        below.set(xlabel="step", ylabel="relative difference", yscale="log")
        for axes in (above, below):
            axes.legend(fontsize=9)
    return figure
