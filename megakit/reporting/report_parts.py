"""Builds parts of a report as HTML: curves, points in space, a confusion matrix, pictures."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.reporting import alternatives
from megakit.reporting.figure_style import BAD, GOOD, blend, class_color, text_color
from megakit.reporting.metrics import Metrics, further_columns, in_words
from megakit.reporting.page_colors import PAGE_COLORS
from megakit.reporting.predictions import shares_of_rows
from megakit.reporting.report import chart, picture

#: Tick values of logarithmic axes; plotly's own ticks show "5" for 0.5.
TICKS = [times * 10.0**power for power in range(-6, 4) for times in (1, 2, 5)]


def curves(rows: Sequence[Metrics], label: str) -> str:
    """Returns a chart of losses over steps; below, further values (if any) and the learning rate.

    `label` names the chart for users who cannot see the chart. First and last values are added.
    """

    def line(column: str, title: str, color: str, **more: Any) -> dict[str, Any]:
        points = [(row.step, value) for row in rows if (value := row[column]) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        style = {"color": color, "width": 2}
        return {"x": steps, "y": values, "name": title, "line": style, "mode": "lines", **more}

    traces = [
        line("train_loss", "training loss", GOOD),
        line("val_loss", "validation loss", BAD, mode="lines+markers", marker={"size": 6}),
        line("lr", "learning rate", PAGE_COLORS["rate"][0], yaxis="y2"),
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
    values = alternatives.curves_table(rows, label)
    return chart(traces, layout, f"{label}. {alternatives.curves_in_words(rows)}") + values


#: Buttons that rotate a 3-D chart: text, name, and the directions right, up and near.
TURNS = (
    *(("\u2190", "Rotate left", "-1 0 0"), ("\u2192", "Rotate right", "1 0 0")),
    *(("\u2191", "Rotate up", "0 1 0"), ("\u2193", "Rotate down", "0 -1 0")),
    *(("+", "Zoom in", "0 0 1"), ("\u2212", "Zoom out", "0 0 -1"), ("reset", "Reset the view", "")),
)


def _turning(chart: str) -> str:
    """Returns a 3-D chart with buttons that rotate the chart, for users without a mouse."""
    buttons = "".join(
        f'<button type=button aria-label="{name}" data-turn="{turn}">{text}</button>'
        for text, name, turn in TURNS
    )
    return (
        f"<div class=space>{chart}<div class=turns role=group aria-label='View of the chart'>"
        f"{buttons}<span>or the arrow keys on these buttons</span></div></div>"
    )


def points_in_space(
    points: NDArray[np.floating],
    classes: NDArray[np.int64],
    label: str,
    *,
    name: str = "",
    most: int = 3000,
) -> str:
    """Returns a 3-D chart of points, which users can rotate, with one colour for each class.

    Buttons rotate the chart, too. A table gives the median and the separation of each class.

    Args:
        points: The points (N, D); only the first three dimensions are shown.
        classes: The class of each point, int64 (N,).
        label: The name of the chart for users who cannot see the chart. Numbers are added.
        name: The id of the element, for a script.
        most: The largest number of points, which are evenly selected from all points.
    """
    shown = np.unique(np.linspace(0, len(points) - 1, min(most, len(points))).astype(np.int64))
    is_own = alternatives.nearest_to_own(points, classes)
    label = f"{label}. {alternatives.space_in_words(is_own, classes, len(shown))}"
    values = alternatives.space_table(points, classes, is_own)
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
        style = {"showarrow": False, "bgcolor": PAGE_COLORS["veil"][0]}
        names.append({**place, "text": f"<b>{k}</b>", **style})
    layout = {"legend": {"itemsizing": "constant"}, "scene": {"annotations": names}}
    return _turning(chart(traces, layout, label, name=name, height=540)) + values


def confusion_matrix(counts: NDArray[np.int64]) -> str:
    """Returns a table of counts (K, K) by label (row) and prediction (column), and accuracies."""
    num_classes, totals = len(counts), counts.sum(axis=1)
    shares = shares_of_rows(counts)
    # Mistakes are few. A separate colour scale shows the most frequent mistakes.
    is_right = np.eye(num_classes, dtype=bool)
    depths = np.where(is_right, shares, shares / max(shares[~is_right].max(initial=0), 1e-9))
    is_deep = [text_color(blend(GOOD, share)) == "#ffffff" for share in np.diag(shares)]
    rights = [f"right{' deep' if deep else ''}" for deep in is_deep]

    def row(label: int) -> str:
        cells = "".join(
            f'<td class="{rights[k] if k == label else "wrong"}" '
            f'style="--depth: {depths[label, k]:.2f}">{counts[label, k] or "·"}</td>'
            for k in range(num_classes)
        )
        right = f"{shares[label, label]:.1%}" if totals[label] else "none"
        return f"<tr><th scope=row>{label}</th>{cells}<td class=share>{right}</td></tr>"

    named = "<span class=unseen>predicted as </span>"
    head = "".join(f"<th scope=col>{named}{k}</th>" for k in range(num_classes))
    return (
        f"<table class=confusion><caption>{alternatives.confusions_in_words(counts)}</caption>"
        "<thead><tr><th scope=col><span class=unseen>label</span></th>"
        f"{head}<th scope=col class=share>right</th></tr></thead>"
        f"<tbody>{''.join(map(row, range(num_classes)))}</tbody></table>"
    )


def mistakes(
    images: NDArray[np.uint8], labels: NDArray[np.int64], probabilities: NDArray[np.float64]
) -> str:
    """Returns pictures (M, H, W), with label, prediction and probability from (M, classes)."""

    def figure(image: NDArray[np.uint8], label: int, of_class: NDArray[np.float64]) -> str:
        percent = np.floor(of_class.max() * 1000) / 10  # only a probability of 1 is 100%
        prediction = of_class.argmax()
        said = f"Label {label}, predicted as {prediction} with probability {percent:.1f}%"
        return (
            f"<figure>{picture(image, said)}<figcaption><b>{label}</b> "
            f"as <b class=wrong>{prediction}</b><br>{percent:.1f}%</figcaption></figure>"
        )

    shown = map(figure, images, labels.tolist(), probabilities)
    return f"<div class=pictures>{''.join(shown)}</div>"


def pairs(
    upper: NDArray[np.uint8],
    lower: NDArray[np.uint8],
    titles: tuple[str, str],
    names: Sequence[str],
) -> str:
    """Returns pairs of pictures (N, H, W), one above the other, and the titles of both rows.

    `names` are the names of the N pairs, for users who cannot see the pictures.
    """
    above, below = map(html.escape, titles)
    columns = [
        f"<figure>{picture(one, f'{name}, {titles[0]}')}{picture(other, f'{name}, {titles[1]}')}"
        "</figure>"
        for one, other, name in zip(upper, lower, names, strict=True)
    ]
    return (
        f"<div class=pairs><div class=names><span>{above}</span><span>{below}</span></div>"
        f"<div class=columns>{''.join(columns)}</div></div>"
    )


def side_by_side(parts: Iterable[tuple[str, str]]) -> str:
    """Returns parts under small headings, side by side if the page is wide enough."""
    cells = [f"<div><h3>{html.escape(title)}</h3>{part}</div>" for title, part in parts]
    return f"<div class=side-by-side>{''.join(cells)}</div>"
