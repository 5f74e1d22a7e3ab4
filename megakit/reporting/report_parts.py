"""Parts of a report, as HTML: curves, points in space, a confusion matrix, pictures."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.reporting.figure_style import BAD, GOOD, class_color
from megakit.reporting.metrics import Metrics, further_columns, in_words
from megakit.reporting.predictions import count_confusions
from megakit.reporting.report import chart, picture

#: Of logarithmic axes; plotly's own are written "5" for 0.5.
TICKS = [times * 10.0**power for power in range(-6, 4) for times in (1, 2, 5)]


def curves(rows: Sequence[Metrics], label: str) -> str:
    """Losses over steps, below them the further values, if there are any, and the learning rate.

    Args:
        rows: Of a metrics.csv.
        label: What the chart shows, for those who cannot see it.
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
    """Points in three dimensions, in the colours of their classes, to be turned.

    Args:
        points: (N, D); of more than three dimensions the first three are shown.
        classes: Class of each, int64 (N,).
        label: What the chart shows, for those who cannot see it.
        name: Identifies the element, for a script.
        most: Show at most so many points, evenly spread over all.
    """
    shown = np.unique(np.linspace(0, len(points) - 1, min(most, len(points))).astype(np.int64))
    points, classes = np.round(points[shown, :3].astype(np.float64), 3), classes[shown]
    points = np.pad(points, ((0, 0), (0, 3 - points.shape[1])))  # a plane lies in space, too
    traces, names = [], []
    for k in np.unique(classes).tolist():
        of_class = points[classes == k]
        traces.append(
            {
                **dict(zip("xyz", of_class.T, strict=True)),
                **{"type": "scatter3d", "mode": "markers", "name": str(k), "hoverinfo": "name"},
                "marker": {"size": 2, "color": class_color(k)},
            }
        )
        # Classes are named where they lie, too: colours alone do not tell everybody.
        middle = dict(zip("xyz", np.median(of_class, axis=0).tolist(), strict=True))
        names.append(
            {**middle, "text": f"<b>{k}</b>", "showarrow": False, "bgcolor": "rgba(255,255,255,.7)"}
        )
    layout = {"legend": {"itemsizing": "constant"}, "scene": {"annotations": names}}
    return chart(traces, layout, label, name=name, height=540)


def confusion_matrix(
    labels: NDArray[np.int64], predictions: NDArray[np.int64], num_classes: int
) -> str:
    """A table of how often each class was taken for each, and the share of right ones.

    Args:
        labels: True classes (N,).
        predictions: Predicted classes (N,).
        num_classes: How many there are.
    """
    counts, shares = count_confusions(labels, predictions, num_classes)
    totals = counts.sum(axis=1)
    # Mistakes are few: a scale of their own shows which are the most frequent.
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
    """Pictures with what they are, what they were taken for, and how surely.

    Args:
        images: (M, H, W).
        labels: What they are (M,).
        probabilities: Of each class (M, K).
    """

    def figure(image: NDArray[np.uint8], label: int, of_class: NDArray[np.float64]) -> str:
        return (
            f"<figure>{picture(image, f'A picture of class {label}')}<figcaption><b>{label}</b> "
            f"as <b class=wrong>{of_class.argmax()}</b><br>{_percent(of_class.max())}"
            "</figcaption></figure>"
        )

    shown = map(figure, images, labels.tolist(), probabilities)
    return f"<div class=pictures>{''.join(shown)}</div>"


def pairs(upper: NDArray[np.uint8], lower: NDArray[np.uint8], titles: tuple[str, str]) -> str:
    """Pictures (N, H, W), each with another one below it, and what the two rows are called."""
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
    """Parts under small headings, beside each other where there is room."""
    cells = [f"<div><h3>{html.escape(title)}</h3>{part}</div>" for title, part in parts]
    return f"<div class=side-by-side>{''.join(cells)}</div>"


def _percent(share: float) -> str:
    """A share in per cent, but never 100% of what is less."""
    return f"{np.floor(share * 1000) / 10:.1f}%"
