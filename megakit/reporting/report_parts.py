"""Builds parts of a report as HTML: curves, points in space, a confusion matrix, pictures."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.reporting.figure_style import BAD, GOOD, class_color
from megakit.reporting.metrics import Metrics, further_columns, in_words
from megakit.reporting.predictions import shares_of_rows
from megakit.reporting.report import chart, picture

#: Tick values of logarithmic axes; plotly's own ticks show "5" for 0.5.
TICKS = [times * 10.0**power for power in range(-6, 4) for times in (1, 2, 5)]


def curves(rows: Sequence[Metrics], label: str) -> str:
    """Returns a chart of losses over steps; below, further values (if any) and the learning rate.

    `label` describes the chart for users who cannot see the chart.
    """

    def line(column: str, title: str, color: str, **more: Any) -> dict[str, Any]:
        points = [(row.step, value) for row in rows if (value := row[column]) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        style = {"color": color, "width": 2}
        return {"x": steps, "y": values, "name": title, "line": style, "mode": "lines", **more}

    traces = [
        line("train_loss", "training loss", GOOD),
        line("val_loss", "validation loss", BAD, mode="lines+markers", marker={"size": 6}),
        line("lr", "learning rate", "#717581", yaxis="y2"),
    ]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "step"}, "anchor": "y2"},
        "yaxis": {"type": "log", "domain": [0.32, 1], "tickvals": TICKS, "tickformat": "~g"},
        "yaxis2": {"domain": [0, 0.22], "rangemode": "tozero", "nticks": 3},
        "hovermode": "x unified",
    }
    further = further_columns(rows)
    for number, column in enumerate(further):
        style = {"mode": "lines+markers", "marker": {"size": 6}, "connectgaps": True}
        traces.append(line(column, in_words(column), class_color(number), yaxis="y3", **style))
    if further:
        layout |= {
            "yaxis": {**layout["yaxis"], "domain": [0.6, 1]},
            "yaxis3": {"domain": [0.28, 0.54], "nticks": 4},
        }
    return chart(traces, layout, label)


def points_in_space(
    points: NDArray[np.floating],
    classes: NDArray[np.int64],
    label: str,
    *,
    name: str = "",
    most: int = 3000,
) -> str:
    """Returns a 3-D chart of points, which users can rotate, with one colour for each class.

    Args:
        points: The points (N, D); only the first three dimensions are shown.
        classes: The class of each point, int64 (N,).
        label: A description of the chart, for users who cannot see the chart.
        name: The id of the element, for a script.
        most: The largest number of points, which are evenly selected from all points.
    """
    shown = np.unique(np.linspace(0, len(points) - 1, min(most, len(points))).astype(np.int64))
    points, classes = np.round(points[shown, :3].astype(np.float64), 3), classes[shown]
    points = np.pad(points, ((0, 0), (0, 3 - points.shape[1])))  # missing dimensions are 0
    traces, names = [], []
    shared = {"type": "scatter3d", "mode": "markers", "hoverinfo": "name"}
    for k in np.unique(classes).tolist():
        of_class = points[classes == k]
        marker = {"size": 2, "color": class_color(k)}
        place = dict(zip("xyz", of_class.T, strict=True))
        traces.append({**shared, **place, "name": str(k), "marker": marker})
        # Names at the class medians help users who cannot distinguish the colours.
        place = dict(zip("xyz", np.median(of_class, axis=0), strict=True))
        style = {"showarrow": False, "bgcolor": "rgba(255,255,255,.7)"}
        names.append({**place, "text": f"<b>{k}</b>", **style})
    layout = {"legend": {"itemsizing": "constant"}, "scene": {"annotations": names}}
    return chart(traces, layout, label, name=name, height=540)


def confusion_matrix(counts: NDArray[np.int64]) -> str:
    """Returns a table of counts (K, K) by label (row) and prediction (column), and accuracies."""
    num_classes, totals = len(counts), counts.sum(axis=1)
    shares = shares_of_rows(counts)
    # Mistakes are few. A separate colour scale shows the most frequent mistakes.
    is_right = np.eye(num_classes, dtype=bool)
    depths = np.where(is_right, shares, shares / max(shares[~is_right].max(initial=0), 1e-9))
    kinds = np.where(is_right, np.where(shares > 0.4, "right deep", "right"), "wrong")

    def row(label: int) -> str:
        cells = "".join(
            f'<td class="{kinds[label, k]}" '
            f'style="--depth: {depths[label, k]:.2f}">{counts[label, k] or "·"}</td>'
            for k in range(num_classes)
        )
        right = f"{shares[label, label]:.1%}" if totals[label] else "none"
        return f"<tr><th scope=row>{label}</th>{cells}<td class=share>{right}</td></tr>"

    head = "".join(f"<th scope=col>{k}</th>" for k in range(num_classes))
    return (
        f"<table class=confusion><thead><tr><td></td>{head}<th scope=col class=share>right</th>"
        f"</tr></thead><tbody>{''.join(map(row, range(num_classes)))}</tbody></table>"
    )


def mistakes(
    images: NDArray[np.uint8], labels: NDArray[np.int64], probabilities: NDArray[np.float64]
) -> str:
    """Returns pictures (M, H, W), with label, prediction and probability from (M, classes)."""

    def figure(image: NDArray[np.uint8], label: int, of_class: NDArray[np.float64]) -> str:
        percent = np.floor(of_class.max() * 1000) / 10  # only a probability of 1 is 100%
        return (
            f"<figure>{picture(image, f'A picture of class {label}')}<figcaption><b>{label}</b> "
            f"as <b class=wrong>{of_class.argmax()}</b><br>{percent:.1f}%</figcaption></figure>"
        )

    shown = map(figure, images, labels.tolist(), probabilities)
    return f"<div class=pictures>{''.join(shown)}</div>"


def pairs(upper: NDArray[np.uint8], lower: NDArray[np.uint8], titles: tuple[str, str]) -> str:
    """Returns pairs of pictures (N, H, W), one above the other, and the titles of both rows."""
    names = [html.escape(title) for title in titles]
    columns = [
        f"<figure>{picture(one, names[0])}{picture(other, names[1])}</figure>"
        for one, other in zip(upper, lower, strict=True)
    ]
    return (
        f"<div class=pairs><div class=names><span>{names[0]}</span><span>{names[1]}</span></div>"
        f"<div class=columns>{''.join(columns)}</div></div>"
    )


def side_by_side(parts: Iterable[tuple[str, str]]) -> str:
    """Returns parts under small headings, side by side if the page is wide enough."""
    cells = [f"<div><h3>{html.escape(title)}</h3>{part}</div>" for title, part in parts]
    return f"<div class=side-by-side>{''.join(cells)}</div>"
