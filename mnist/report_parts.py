"""Builds parts of a report as HTML: curves, points in space, a confusion matrix, pictures."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from megakit.training.classifier import Predictions
from megakit.training.metrics_csv import Metrics, further_columns, in_words
from mnist.figure_style import BAD, DEEP, GOOD, class_color, percent, shares_of_rows
from mnist.figures import clear_view
from mnist.report_frame import ENVIRONMENT, chart, picture

#: Tick values of logarithmic axes; plotly's own ticks show "5" for 0.5.
TICKS = [times * 10.0**power for power in range(-6, 4) for times in (1, 2, 5)]
#: The macros of the template, which return `Markup`.
MACROS: Any = ENVIRONMENT.get_template("parts.html", globals={"picture": picture}).module


def curves(rows: Sequence[Metrics], label: str) -> Markup:
    """Returns a chart of losses over steps; below, further values (if any) and the learning rate.

    `label` names the chart for users who cannot see the chart.
    """

    def line(column: str, title: str, color: str, **more: Any) -> dict[str, Any]:
        points = [(row.step, value) for row in rows if (value := row[column]) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        style = {"color": color, "width": 2}
        return {"x": steps, "y": values, "name": title, "line": style, "mode": "lines", **more}

    marked = {"mode": "lines+markers", "marker": {"size": 6}}
    further = further_columns(rows)
    traces = [
        line("train_loss", "training loss", GOOD),
        line("val_loss", "validation loss", BAD, **marked),
        line("lr", "learning rate", "#717581", yaxis="y2"),
        *(
            line(column, in_words(column), class_color(number), yaxis="y3", **marked)
            for number, column in enumerate(further)
        ),
    ]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "step"}, "anchor": "y2"},
        "yaxis": {"type": "log", "domain": [0.32, 1], "tickvals": TICKS, "tickformat": "~g"},
        "yaxis2": {"domain": [0, 0.22], "rangemode": "tozero", "nticks": 3},
        "hovermode": "x unified",
    }
    if further:
        layout["yaxis"]["domain"] = [0.6, 1]
        layout["yaxis3"] = {"domain": [0.28, 0.54], "nticks": 4}
    return chart(traces, layout, label)


def points_in_space(
    points: NDArray[np.floating],
    classes: NDArray[np.int64],
    label: str,
    *,
    name: str = "",
    most: int = 3000,
) -> Markup:
    """Returns a 3-D chart of points, which users can rotate, with one colour for each class.

    Args:
        points: The points (N, D); only the first three dimensions are shown.
        classes: The class of each point, int64 (N,).
        label: The name of the chart for users who cannot see the chart.
        name: The id of the element, for a script.
        most: The largest number of points, which are evenly selected from all points.
    """
    shown = np.unique(np.linspace(0, len(points) - 1, min(most, len(points))).astype(np.int64))
    points, classes = np.round(points[shown, :3].astype(np.float64), 3), classes[shown]
    points = np.pad(points, ((0, 0), (0, 3 - points.shape[1])))  # missing dimensions are 0
    traces, names, middles = [], [], []
    for k in np.unique(classes).tolist():
        of_class = points[classes == k]
        place = dict(zip("xyz", of_class.T, strict=True))
        style = {"mode": "markers", "marker": {"size": 2, "color": class_color(k)}}
        traces.append({"type": "scatter3d", "name": str(k), "hoverinfo": "name", **place, **style})
        # Names at the class medians help users who cannot distinguish the colours.
        middles.append(np.median(of_class, axis=0))
        place = dict(zip("xyz", middles[-1], strict=True))
        text = {"text": f"<b>{k}</b>", "bgcolor": "rgba(255,255,255,.85)"}
        names.append({"showarrow": False, **place, **text})
    eye = 1.6 * clear_view(middles, np.ptp(points, axis=0))
    layout = {
        "margin": {"l": 0, "r": 0, "t": 0, "b": 0},
        "legend": {"itemsizing": "constant"},
        "scene": {"annotations": names, "camera": {"eye": dict(zip("xyz", eye, strict=True))}},
    }
    part: Markup = MACROS.space(chart(traces, layout, label, name=name, height=540))
    return part


def confusion_matrix(counts: NDArray[np.int64]) -> Markup:
    """Returns a table of counts (K, K) by label (row) and prediction (column), and accuracies."""
    shares, is_right = shares_of_rows(counts), np.eye(len(counts), dtype=bool)
    # Mistakes are few. A separate colour scale shows the most frequent mistakes.
    depths = np.where(is_right, shares, shares / max(shares[~is_right].max(initial=0), 1e-9))
    rights = [
        f"{share:.1%}" if total else "none"
        for share, total in zip(np.diag(shares), counts.sum(axis=1), strict=True)
    ]
    mistakes = np.where(is_right, 0, counts)
    part: Markup = MACROS.confusion(
        counts.tolist(),
        depths.tolist(),
        DEEP,
        rights,
        total=int(counts.sum()),
        right=int(np.trace(counts)),
        most=int(mistakes.max()),
        worst=divmod(int(mistakes.argmax()), len(counts)),
    )
    return part


def mistakes(images: NDArray[np.uint8], predictions: Predictions) -> Markup:
    """Returns pictures (M, H, W), each with label, prediction and probability."""
    percents = map(percent, predictions.probabilities.max(axis=1))
    shown = zip(images, predictions.label, predictions.prediction, percents, strict=True)
    part: Markup = MACROS.mistakes(shown)
    return part


def pairs(
    upper: NDArray[np.uint8],
    lower: NDArray[np.uint8],
    titles: tuple[str, str],
    names: Sequence[str],
) -> Markup:
    """Returns pairs of pictures (N, H, W), one above the other, and the titles of both rows.

    `names` are the names of the N pairs, for users who cannot see the pictures.
    """
    part: Markup = MACROS.pairs(zip(names, upper, lower, strict=True), titles)
    return part


def side_by_side(parts: Iterable[tuple[str, Markup]]) -> Markup:
    """Returns parts under small headings, side by side if the page is wide enough."""
    part: Markup = MACROS.side_by_side(parts)
    return part
