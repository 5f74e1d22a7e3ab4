"""Removes the lines of ruled and squared paper from the ink of a photo."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage  # type: ignore[import-untyped]

Plane = NDArray[np.float32]
Mask = NDArray[np.bool_]

#: Largest slope of a line: 13 degrees.
STEEPEST = 0.24
#: Share of the photo's width that a line crosses.
COVERED = 0.65


def remove_lines(ink: Plane, level: float, noise: float) -> tuple[Plane, Mask, int]:
    """Removes lines that cross the whole photo, horizontally or vertically or a little tilted.

    Where a stroke crosses a line, the stroke stays: the pixels of the line get the smaller ink of
    the pixels above and below the line, unless they are much darker than the line itself.

    Args:
        ink: Ink at each pixel, about 0 on paper, (height, width).
        level: Ink of the strokes.
        noise: Standard deviation of the ink on paper.

    Returns:
        The ink without lines, a mask of the lines' pixels, and the number of lines.
    """
    least = max(0.1 * level, noise)
    ink, on_horizontal, horizontal = _remove_horizontal(ink, level, least)
    ink, on_vertical, vertical = _remove_horizontal(ink.T, level, least)
    return ink.T, on_horizontal | on_vertical.T, horizontal + vertical


def _remove_horizontal(ink: Plane, level: float, least: float) -> tuple[Plane, Mask, int]:
    height, width = ink.shape
    slope = _slope(np.clip(ink, 0, 0.4 * level))
    shifts = np.round(slope * (np.arange(width) - width / 2)).astype(int)
    margin = int(np.abs(shifts).max())
    rows = np.arange(-margin, height + margin)[:, None] + shifts
    inside = (rows >= 0) & (rows < height)
    columns = np.broadcast_to(np.arange(width), rows.shape)
    sheared = ink[np.clip(rows, 0, height - 1), columns]
    # The ink that most of a line's pixels exceed; pixels outside the photo are above every share.
    ordered = np.sort(np.where(inside, sheared, np.inf), axis=1)
    at = ((1 - COVERED) * inside.sum(axis=1)).astype(int)
    covered = np.take_along_axis(ordered, at[:, None], axis=1)[:, 0]
    runs, _ = ndimage.label((inside.sum(axis=1) > width // 4) & (covered > least))
    on_line = np.zeros(sheared.shape, bool)
    number = 0
    for (run,) in ndimage.find_objects(runs):
        first, last = max(run.start - 1, 0), min(run.stop, len(sheared) - 1)
        if run.stop - run.start > 3 + height / 100 or not _reaches_both_ends(
            sheared[first : run.stop + 1], inside[(run.start + run.stop) // 2], least
        ):
            continue
        number += 1
        on_line[first : last + 1] = True
        band = sheared[first : last + 1]
        beside = np.minimum(sheared[max(first - 2, 0)], sheared[min(last + 2, len(sheared) - 1)])
        is_stroke = band > max(1.6 * float(covered[run].max()), 0.55 * level)
        sheared[first : last + 1] = np.where(is_stroke, band, np.minimum(band, beside))
    made, is_line = ink.copy(), np.zeros(ink.shape, bool)
    made[rows[inside], columns[inside]] = sheared[inside]
    is_line[rows[inside], columns[inside]] = on_line[inside]
    return made, is_line, number


def _reaches_both_ends(band: Plane, inside: NDArray[np.bool_], least: float) -> bool:
    """Returns whether a line has ink at both ends of the photo, where it is inside."""
    ends = band.max(axis=0)[inside]
    part = max(2, band.shape[1] // 30)
    return bool(min(np.median(ends[:part]), np.median(ends[-part:])) > least)


def _slope(ink: Plane) -> float:
    """Returns the slope at which the rows of a photo differ most: the slope of its lines."""
    height, width = ink.shape
    columns = np.linspace(0, width - 1, min(32, width)).astype(int)

    def best(slopes: NDArray[np.float64]) -> float:
        shifts = np.round(slopes[:, None] * (columns - width / 2)).astype(int)
        rows = np.arange(height)[:, None] + shifts[:, None, :]
        inside = (rows >= 0) & (rows < height)
        found = ink[np.clip(rows, 0, height - 1), columns] * inside
        means = found.sum(axis=2) / np.maximum(inside.sum(axis=2), len(columns) // 2)
        return float(slopes[np.argmax((np.diff(means, axis=1) ** 2).sum(axis=1))])

    step = 2 / width
    middle = best(np.arange(-STEEPEST, STEEPEST + 2 * step, 4 * step))
    return best(middle + step * np.linspace(-3, 3, 13))
