"""Finds connected parts of a mask of ink, and measures and thickens strokes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Plane = NDArray[np.float32]

LONGER_SIDE = 100
"""Longer side of a digit, in pixels, when its strokes are measured."""
THIN = 8.0
"""Width of a stroke, of `LONGER_SIDE`, below which strokes are thickened."""
USUAL = 12.0
"""Width that thin strokes are thickened to: half of MNIST's digits have 11.5 to 16."""
LEAST_PART = 0.05
"""Smallest part of a digit, as a share of the ink of the largest part."""
NEAR = 0.35
"""Largest distance of a part from the largest part, as a share of the largest part's length."""


@dataclass(frozen=True)
class Parts:
    """The connected parts of a mask; pixels that touch at a corner are connected.

    Attributes:
        labels: The part of each pixel, from 0; -1 for no part. int64 (height, width).
        boxes: First row, first column, last row and last column of each part, int64 (N, 4).
    """

    labels: NDArray[np.int64]
    boxes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.boxes)

    def sums(self, values: Plane) -> NDArray[np.float64]:
        """Returns the sum of the values of each part's pixels, (N,)."""
        inside = self.labels >= 0
        return np.bincount(self.labels[inside], values[inside], len(self)).astype(np.float64)


def parts_of(mask: Mask) -> Parts:
    """Finds the connected parts of a mask.

    The horizontal runs of each row are found first. Runs of neighbouring rows that touch are
    joined, until every run of a part has the number of the part's first run.
    """
    height, width = mask.shape
    padded = np.zeros((height, width + 2), np.int8)
    padded[:, 1:-1] = mask
    edges = np.flatnonzero(np.diff(padded.ravel()))
    starts, ends = edges[::2] + 1, edges[1::2]  # in the flat padded mask; both inclusive
    number, stride = len(starts), width + 2
    # The runs of the next row that begin before the end of a run and end after its beginning.
    low = np.searchsorted(ends, starts + stride - 1)
    high = np.searchsorted(starts, ends + stride + 1, side="right")
    count = np.maximum(high - low, 0)
    upper = np.repeat(np.arange(number), count)
    lower = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + low[upper]
    root = np.arange(number)
    while True:
        first, second = root[upper], root[lower]
        least = np.minimum(first, second)
        if (first == second).all():
            break
        np.minimum.at(root, first, least)
        np.minimum.at(root, second, least)
        while (root[root] != root).any():
            root = root[root]
    _, part = np.unique(root, return_inverse=True)
    labels = np.full(height * stride, -1)
    lengths = ends - starts + 1
    inside = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
    labels[inside] = np.repeat(part, lengths)
    total = int(part.max()) + 1 if number else 0
    boxes = np.tile(np.array([height, width, -1, -1]), (total, 1))
    rows = starts // stride
    np.minimum.at(boxes[:, 0], part, rows)
    np.minimum.at(boxes[:, 1], part, starts % stride - 1)
    np.maximum.at(boxes[:, 2], part, rows)
    np.maximum.at(boxes[:, 3], part, ends % stride - 1)
    return Parts(labels.reshape(height, stride)[:, 1:-1], boxes)


def main_parts(mask: Mask, ink: Plane) -> Mask:
    """Returns the mask of the digit: its largest part, and parts that belong to the digit.

    A part at the edge of the picture is the largest only if there is no other large part; a part at
    two sides with a common corner, only if there is nearly no other ink. Other parts belong to the
    digit if they are large enough and near.

    Args:
        mask: The pixels with ink, (height, width).
        ink: The amount of ink at each pixel, (height, width).

    Raises:
        ValueError: The mask is empty.
    """
    parts = parts_of(_grown(mask))
    if not len(parts):
        raise ValueError("contains no ink")
    masses = parts.sums(np.where(mask, ink, 0).astype(np.float32))
    height, width = mask.shape
    top, left, bottom, right = parts.boxes.T
    at_rows = (top <= 1) | (bottom >= height - 2)
    at_columns = (left <= 1) | (right >= width - 2)
    # A table beside the paper reaches a corner, and has much more ink than the digit.
    for at_edge, share in ((at_rows & at_columns, 0.02), (at_rows | at_columns, 0.15)):
        inner = np.where(at_edge, 0, masses)
        if inner.max() > share * masses.max():
            masses = inner
    main = int(masses.argmax())
    reach = NEAR * max(bottom[main] - top[main], right[main] - left[main])
    away_y = np.maximum(top - bottom[main], top[main] - bottom)
    away_x = np.maximum(left - right[main], left[main] - right)
    is_near = np.maximum(away_y, away_x) <= reach
    kept = is_near & (masses >= LEAST_PART * masses[main])
    return np.append(kept, False)[parts.labels]


def _grown(mask: Mask) -> Mask:
    """Adds the pixels next to a mask."""
    wide = np.pad(mask, 1)
    rows = wide[:-2] | wide[1:-1] | wide[2:]
    return rows[:, :-2] | rows[:, 1:-1] | rows[:, 2:]


def stroke_width(mask: Mask) -> float:
    """Returns the width of a mask's strokes in pixels: twice the area by the length of the edge."""
    wide = np.pad(mask, 1)
    inner = wide[:-2, 1:-1] & wide[2:, 1:-1] & wide[1:-1, :-2] & wide[1:-1, 2:]
    return float(2 * mask.sum() / max((mask & ~inner).sum(), 1))


def thickened(ink: Plane) -> tuple[NDArray[np.uint8], bool]:
    """Cuts out a digit, and thickens its strokes if they are thinner than MNIST's.

    Args:
        ink: Ink from 0 to 1, (height, width).

    Returns:
        uint8 with margins of 0, and whether strokes were thickened.
    """
    from PIL import Image

    rows, columns = (np.flatnonzero((ink > 0.2).any(axis=axis)) for axis in (1, 0))
    cut = np.pad(ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1], 1)
    scale = LONGER_SIDE / max(cut.shape)
    shape = (max(1, round(cut.shape[1] * scale)), max(1, round(cut.shape[0] * scale)))
    image = Image.fromarray((255 * cut + 0.5).astype(np.uint8))
    digit = np.asarray(image.resize(shape, Image.Resampling.BICUBIC))
    width = stroke_width(digit > 127)
    if width >= THIN:
        return np.pad(digit, 8), False
    return _dilated(np.pad(digit, 8), (USUAL - width) / 2), True


def _dilated(digit: NDArray[np.uint8], radius: float) -> NDArray[np.uint8]:
    """Replaces each pixel by the brightest pixel within a radius; the margins are wider."""
    reach = int(np.ceil(radius))
    made = digit.copy()
    for y in range(-reach, reach + 1):
        for x in range(-reach, reach + 1):
            share = min(1.0, radius + 1 - float(np.hypot(y, x)))
            if share > 0:
                moved = np.roll(digit, (y, x), (0, 1))
                np.maximum(made, (share * moved).astype(np.uint8), out=made)
    return made
