"""Removes the lines of ruled and squared paper from the ink of a photo."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.float32]

STEEPEST = 0.24
"""Largest slope of a line: 13 degrees."""
COLUMNS = 32
"""Number of columns that the slope is found on."""
COVERED = 0.65
"""Share of the photo's width on which a line has ink."""
THICKEST = 0.01
"""Largest width of a line, as a share of the photo's height, plus 3 pixels."""


def remove_lines(ink: Plane, level: float, noise: float) -> tuple[Plane, int]:
    """Removes lines that cross the whole photo, horizontally or vertically or a little tilted.

    Where a stroke crosses a line, the stroke stays: the pixels of the line get the smaller ink of
    the pixels above and below the line, unless they are much darker than the line itself.

    Args:
        ink: Ink at each pixel, about 0 on paper, (height, width).
        level: Ink of the strokes.
        noise: Standard deviation of the ink on paper.

    Returns:
        The ink without lines, and the number of lines.
    """
    least = max(0.1 * level, noise)
    ink, horizontal = _remove_horizontal(ink, level, least)
    ink, vertical = _remove_horizontal(np.ascontiguousarray(ink.T), level, least)
    return np.ascontiguousarray(ink.T), horizontal + vertical


def _remove_horizontal(ink: Plane, level: float, least: float) -> tuple[Plane, int]:
    height, width = ink.shape
    slope = _slope(np.clip(ink, 0, 0.4 * level))
    shifts = np.round(slope * (np.arange(width) - width / 2)).astype(int)
    margin = int(np.abs(shifts).max()) if slope else 0
    rows = np.arange(-margin, height + margin)[:, None] + shifts
    inside = (rows >= 0) & (rows < height)
    columns = np.arange(width)
    sheared = ink[np.clip(rows, 0, height - 1), columns]
    bands = _bands(sheared, inside, least, 3 + THICKEST * height)
    for first, last, strength in bands:
        above, below = sheared[max(first - 2, 0)], sheared[min(last + 2, len(sheared) - 1)]
        band = sheared[first : last + 1]
        through = np.minimum(above, below)
        is_stroke = band > max(1.6 * strength, 0.55 * level)
        sheared[first : last + 1] = np.where(is_stroke, band, np.minimum(band, through))
    if not bands:
        return ink, 0
    made = ink.copy()
    made[rows[inside], np.broadcast_to(columns, rows.shape)[inside]] = sheared[inside]
    return made, len(bands)


def _slope(ink: Plane) -> float:
    """Returns the slope at which the rows of a photo differ most: the slope of its lines."""
    height, width = ink.shape
    columns = np.linspace(0, width - 1, min(COLUMNS, width)).astype(int)
    sample = ink[:, columns]
    from_middle = columns - width / 2

    def best(slopes: NDArray[np.float64]) -> float:
        shifts = np.round(slopes[:, None] * from_middle).astype(int)
        rows = np.arange(height)[:, None] + shifts[:, None, :]
        inside = (rows >= 0) & (rows < height)
        found = sample[np.clip(rows, 0, height - 1), np.arange(len(columns))] * inside
        sums = found.sum(axis=2) / np.maximum(inside.sum(axis=2), len(columns) // 2)
        return float(slopes[np.argmax((np.diff(sums, axis=1) ** 2).sum(axis=1))])

    step = 2 / width
    coarse = np.arange(-STEEPEST, STEEPEST + 2 * step, 4 * step)
    middle = best(coarse)
    return best(middle + step * np.linspace(-3, 3, 13))


def _bands(
    sheared: Plane, inside: NDArray[np.bool_], least: float, thickest: float
) -> list[tuple[int, int, float]]:
    """Returns the first row, last row and ink of each line in an image with horizontal lines."""
    width = sheared.shape[1]
    number = inside.sum(axis=1)
    # A pixel outside the photo is above every quantile.
    ordered = np.sort(np.where(inside, sheared, np.inf), axis=1)
    at = ((1 - COVERED) * number).astype(int)
    covered = np.take_along_axis(ordered, at[:, None], axis=1)[:, 0]
    is_line = (number > width // 4) & (covered > least)
    edges = np.flatnonzero(np.diff(np.pad(is_line.astype(np.int8), 1)))
    found = []
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        if end - first > thickest:
            continue
        strength = float(covered[first:end].max())
        there = np.flatnonzero(inside[(first + end) // 2])
        ends = sheared[max(first - 1, 0) : end + 1].max(axis=0)[there]
        part = max(2, width // 30)
        if min(np.median(ends[:part]), np.median(ends[-part:])) > least:
            found.append((max(first - 1, 0), min(end, len(sheared) - 1), strength))
    return found
