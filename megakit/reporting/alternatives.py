"""Describes charts and tables of a report in words and numbers, for readers who cannot see them."""

import html
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from megakit.reporting.metrics import Metrics, further_columns, in_words

Points = list[tuple[int, float]]


def measured(rows: Sequence[Metrics]) -> dict[str, Points]:
    """Returns the steps and values of each measured quantity, by its name in words."""
    names = {"train_loss": "training loss", "val_loss": "validation loss"}
    names |= {column: in_words(column) for column in further_columns(rows)}
    names["lr"] = "learning rate"
    found = {
        name: [(row.step, value) for row in rows if (value := row[column]) is not None]
        for column, name in names.items()
    }
    return {name: points for name, points in found.items() if points}


def curves_in_words(rows: Sequence[Metrics]) -> str:
    """Returns a sentence for each curve: its first and its last value."""
    sentences = []
    for name, points in measured(rows).items():
        ends = [points[0], points[-1]] if len(points) > 1 else points
        values = ", then ".join(f"{value:.3g} at step {step:,}" for step, value in ends)
        sentences.append(f"{name.capitalize()}: {values}.")
    return " ".join(sentences) or "No values."


def curves_table(rows: Sequence[Metrics], caption: str) -> str:
    """Returns a table, hidden until opened, with the first, last, lowest and highest values."""

    def cell(point: tuple[int, float]) -> str:
        return f"{point[1]:.3g} (step {point[0]:,})"

    lines = []
    for name, points in measured(rows).items():
        extremes = (min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1]))
        lines.append([name, *map(cell, (points[0], points[-1], *extremes))])
    head = ["value", "first", "last", "lowest", "highest"]
    return details("The curves as a table", caption, table(caption, head, lines))


def nearest_to_own(points: NDArray[np.floating], classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns for each point (N, D) whether the median of its own class is the nearest median."""
    names, numbers = np.unique(classes, return_inverse=True)
    medians = (np.median(points[classes == name], axis=0) for name in names)
    distances = np.stack([np.linalg.norm(points - median, axis=1) for median in medians])
    is_own: NDArray[np.bool_] = distances.argmin(axis=0) == numbers
    return is_own


def space_in_words(is_own: NDArray[np.bool_], classes: NDArray[np.int64], shown: int) -> str:
    """Returns sentences on N points: their number, and how well the classes are separated."""
    most, least = _extremes(is_own, classes)
    return (
        f"{len(classes):,} points in {len(np.unique(classes))} classes; {shown:,} are shown. "
        f"{is_own.mean():.0%} of the points are nearer to the median of their own class than to "
        f"any other: from {least[0]:.0%} of class {least[1]} to {most[0]:.0%} of class {most[1]}."
    )


def _extremes(
    is_own: NDArray[np.bool_], classes: NDArray[np.int64]
) -> tuple[tuple[float, int], tuple[float, int]]:
    shares = [(float(is_own[classes == k].mean()), int(k)) for k in np.unique(classes)]
    return max(shares), min(shares)


def space_table(
    points: NDArray[np.floating], classes: NDArray[np.int64], is_own: NDArray[np.bool_]
) -> str:
    """Returns a table, hidden until opened: size, median and separation of each class."""
    lines = []
    for k in np.unique(classes).tolist():
        of_class = classes == k
        middle = [f"{value:.1f}" for value in np.median(points[of_class, :3], axis=0)]
        share = f"{is_own[of_class].mean():.1%}"
        lines.append([str(k), f"{of_class.sum():,}", *middle, share])
    axes = [f"median {axis}" for axis in "xyz"[: points.shape[1]]]
    head = ["class", "points", *axes, "nearest to own median"]
    caption = "The classes in the latent space"
    return details("The points as a table", caption, table(caption, head, lines))


def confusions_in_words(counts: NDArray[np.int64]) -> str:
    """Returns sentences on counts (K, K): how many are right, and the most frequent mistake."""
    right, total = int(np.trace(counts)), int(counts.sum())
    mistakes = counts * (1 - np.eye(len(counts), dtype=np.int64))
    label, prediction = np.unravel_index(int(mistakes.argmax()), counts.shape)
    most = mistakes[label, prediction]
    words = f"{right:,} of {total:,} are right."
    if most:
        words += (
            f" The most frequent mistake: label {label} predicted as {prediction}, {most:,} times."
        )
    return words


def table(caption: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns an HTML table from texts; the first cell of each line is the line's heading."""
    heads = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in head)
    rows = "".join(
        f"<tr><th scope=row>{html.escape(first)}</th>"
        + "".join(f"<td>{html.escape(text)}</td>" for text in others)
        + "</tr>"
        for first, *others in lines
    )
    return (
        f"<table class=values><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    )


def details(summary: str, name: str, body: str) -> str:
    """Returns HTML that users open with a click or the Enter key. A wide body scrolls."""
    return (
        f"<details><summary>{html.escape(summary)}</summary>"
        f'<div class=wide tabindex=0 role=group aria-label="{html.escape(name)}">{body}</div>'
        "</details>"
    )
