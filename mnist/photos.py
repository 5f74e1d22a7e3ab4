"""Cleans a photo of a digit: removes uneven light, noise, specks and the lines of the paper.

A photo becomes the form that `own_pictures.to_training_form` expects: ink on 0. The steps are:

1. The photo is shrunk until its longer side has about 300 pixels.
2. The brightness of the paper is estimated at each pixel, `_paper`. The ink at a pixel is the
   relative difference between the pixel and the paper.
3. Lines across the whole photo are removed, `paper_lines.remove_lines`.
4. Pixels below a part of the ink's level, or within the noise, are removed.
5. Connected parts that are small, or that reach the photo's edge, are removed.
6. Thin strokes are thickened to the width of MNIST's strokes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from mnist.paper_lines import remove_lines
from mnist.strokes import main_parts, thickened

Plane = NDArray[np.float32]

SMALL = 40
"""Pictures whose longer side has at most this many pixels are drawings, not photos."""
LONGER_SIDE = 300
"""About the longer side of the shrunken photo, in pixels."""
COARSE_SIDE = 80
"""About the longer side of the image that the paper is estimated on, in pixels."""
REACH = 0.3
"""Largest width of a stroke, as a share of the photo's longer side."""
SHORTEST = 8
"""Pictures whose shorter side has fewer pixels, after shrinking, are drawings, not photos."""
SPARSE = 3
"""Of rows and columns, statistics of the whole photo use every third."""
STRONGEST = 0.998
"""Share of a photo's pixels with less ink than the level of the ink."""
DARKEST = 16
"""Smallest brightness of paper, because the ink is relative to it."""
MARGIN = 2
"""Rows and columns beside the digit that the blur of a stroke may reach, after shrinking."""
LEAST_INK = 0.12
"""Smallest relative difference between ink and paper."""
EDGE = 0.4
"""Share of the ink's level that is the edge of a stroke."""
NOISE = 3.5
"""Number of standard deviations of the noise that an ink pixel exceeds."""


@dataclass(frozen=True)
class Cleaned:
    """A picture after the clean-up.

    Attributes:
        pixels: uint8 (height, width); the given array if the clean-up changed nothing. Otherwise
            the ink is bright, and the paper is 0.
        is_dark: Whether the ink of the picture was darker than the paper.
        changes: What the clean-up removed or changed, for remarks.
    """

    pixels: NDArray[np.uint8]
    is_dark: bool
    changes: tuple[str, ...] = ()


def clean(pixels: NDArray[np.uint8], paper: int) -> Cleaned:
    """Cleans a grey picture; returns a small picture, or a drawing on even paper, unchanged.

    Args:
        pixels: uint8 (height, width).
        paper: Median brightness of the picture's border.

    Raises:
        ValueError: The picture contains no ink.
    """
    untouched = Cleaned(pixels, paper >= 128)
    grey = _shrunk(pixels)
    if max(pixels.shape) <= SMALL or min(grey.shape) < SHORTEST:
        return untouched
    is_even = _is_even(grey, paper)
    ink, is_dark = _ink_on_even_paper(grey, paper) if is_even else _ink_on_any_paper(grey)
    ink, level, noise = _measured(ink, is_even)
    edge = max(EDGE * level, NOISE * noise)
    ink, num_lines = _without_lines(ink, level, noise, edge)
    least = level / 8 if is_even else edge  # `to_training_form` keeps an eighth of the ink
    digit = main_parts(ink > least, ink)
    made, is_thickened = thickened(_smooth(np.where(digit, ink, 0), edge))
    found = {
        "uneven light and noise of the paper removed": not is_even,
        "lines of the paper removed": num_lines > 0,
        "ink beside the digit removed": is_even and _has_ink_beyond(digit, pixels, paper),
        "thin strokes thickened": is_thickened,
    }
    changes = tuple(change for change, happened in found.items() if happened)
    if not changes and is_dark == untouched.is_dark:
        return untouched
    return Cleaned(made, is_dark, changes)


def _measured(ink: Plane, is_even: bool) -> tuple[Plane, float, float]:
    """Returns the ink with 0 on paper and with less noise, the ink's level, and the noise.

    Raises:
        ValueError: The picture contains no ink.
    """
    level = float(np.quantile(ink, 1 if is_even else STRONGEST))
    sample = ink[::SPARSE, ::SPARSE]
    on_paper = sample[sample <= max(level / 2, sample.min())]
    middle = 0 if is_even else np.median(on_paper)
    noise = float(1.4826 * np.median(np.abs(on_paper - middle)))
    ink, level = ink - middle, level - float(middle)
    if level < max(LEAST_INK, 5 * noise):
        raise ValueError("contains no ink")
    if noise > level / 15:
        return blurred(ink, 1.2), level, noise / 3
    return ink, level, noise


def _has_ink_beyond(digit: NDArray[np.bool_], pixels: NDArray[np.uint8], paper: int) -> bool:
    """Returns whether a picture has ink beyond the digit's box: specks, or noise before shrinking.

    Args:
        digit: The digit in the shrunken picture.
        pixels: The picture. Its ink is defined as in `own_pictures.to_training_form`.
        paper: Median brightness of the picture's border.
    """
    bright, ground = (255 - pixels, 255 - paper) if paper >= 128 else (pixels, paper)
    ink = np.maximum(bright, ground) - np.uint8(ground)
    is_ink = ink >= max(1, -(-int(ink.max()) // 8))
    for axis in (0, 1):
        there = np.flatnonzero(is_ink.any(axis=1 - axis))
        inside = np.flatnonzero(digit.any(axis=1 - axis))
        factor = -(-pixels.shape[axis] // digit.shape[axis])
        if not there.size or there[0] < (inside[0] - MARGIN) * factor:
            return True
        if there[-1] >= (inside[-1] + 1 + MARGIN) * factor:
            return True
    return False


def _smooth(ink: Plane, edge: float) -> Plane:
    """Scales ink to a range from 0 to 1, with smooth edges of the strokes."""
    strong = ink[ink > edge]
    level = float(np.quantile(strong, 0.7) if strong.size else ink.max())
    return np.clip((ink / level - EDGE / 2) / EDGE, 0, 1)


def _without_lines(ink: Plane, level: float, noise: float, edge: float) -> tuple[Plane, int]:
    """Removes the lines of the paper, unless they are nearly all ink: a 1 from edge to edge."""
    removed, num_lines = remove_lines(ink, level, noise)
    is_digit = num_lines <= 2 and (removed > edge).sum() < 0.1 * (ink > edge).sum()
    return (ink, 0) if is_digit else (removed, num_lines)


def _shrunk(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Shrinks a picture by a whole number, so that its longer side is about `LONGER_SIDE`."""
    factor = max(1, round(max(pixels.shape) / LONGER_SIDE))
    return np.asarray(Image.fromarray(pixels).reduce(factor))


def _is_even(grey: NDArray[np.uint8], paper: int) -> bool:
    """Returns whether many pixels have the brightness of the border, as in a drawing or a scan."""
    away = np.abs(grey.astype(np.int16) - paper)
    border = np.concatenate([away[0], away[-1], away[:, 0], away[:, -1]])
    is_drawn = (away == 0).mean() >= 0.2 and (border == 0).mean() >= 0.5
    is_scanned = (away <= 2).mean() >= 0.5 and (border <= 16).mean() >= 0.9
    return bool(is_drawn or is_scanned)


def _ink_on_even_paper(grey: NDArray[np.uint8], paper: int) -> tuple[Plane, bool]:
    """Returns the ink at each pixel, as a share of the largest possible, and whether it is dark."""
    is_dark = paper - int(grey.min()) >= int(grey.max()) - paper
    difference = grey.astype(np.float32) - paper
    most = paper if is_dark else 255 - paper  # 0 only if every pixel is paper
    return (-difference if is_dark else difference) / np.float32(max(most, 1)), is_dark


def _ink_on_any_paper(grey: NDArray[np.uint8]) -> tuple[Plane, bool]:
    """Returns the ink at each pixel of a photo, relative to the paper, and whether it is dark."""
    is_dark = _has_dark_ink(grey)
    factor = max(1, round(max(grey.shape) / COARSE_SIDE))
    coarse = Image.fromarray(grey).reduce(factor).filter(ImageFilter.GaussianBlur(0.8))
    size = max(3, round(REACH * max(coarse.size)) | 1)
    paper = Image.fromarray(_closed(np.asarray(coarse, np.float32), size, is_dark))
    shape = (coarse.width * factor, coarse.height * factor)
    smooth = np.asarray(paper.resize(shape, Image.Resampling.BILINEAR))
    smooth = np.maximum(smooth[: grey.shape[0], : grey.shape[1]], DARKEST)
    return (1 - grey / smooth if is_dark else grey / smooth - 1), is_dark


def _has_dark_ink(grey: NDArray[np.uint8]) -> bool:
    """Returns whether the ink is darker than a plane through the brightness of the paper."""
    values = grey[::SPARSE, ::SPARSE].astype(np.float64)
    y, x = np.mgrid[: values.shape[0], : values.shape[1]] / max(values.shape)
    terms = np.stack([np.ones_like(y), y, x]).reshape(3, -1).T
    flat = values.ravel()
    away = np.abs(flat - np.median(flat))
    for _ in range(4):  # without what differs most, such as the ink and a table beside the paper
        kept = away <= np.quantile(away, 0.6)
        plane = np.linalg.lstsq(terms[kept], flat[kept], rcond=None)[0]
        away = np.abs(flat - terms @ plane)
    rest = flat - terms @ plane
    darkest, brightest = np.quantile(rest, [0.004, 0.996])
    return bool(-darkest >= brightest)


def _closed(values: Plane, size: int, is_dark: bool) -> Plane:
    """Replaces dark (or else bright) features narrower than `size` by what surrounds them."""
    first, second = (np.max, np.min) if is_dark else (np.min, np.max)
    for function in (first, second):
        for axis in (0, 1):
            half = [(0, 0), (0, 0)]
            half[axis] = (size // 2, size // 2)
            wide = np.pad(values, half, mode="edge")
            windows = np.lib.stride_tricks.sliding_window_view(wide, size, axis)
            values = function(windows, axis=-1)
    return values


def blurred(values: Plane, radius: float) -> Plane:
    """Blurs values with a Gaussian of a standard deviation in pixels."""
    reach = int(np.ceil(2.5 * radius))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / radius) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    for axis in (0, 1):
        edges = [(0, 0), (0, 0)]
        edges[axis] = (reach, reach)
        wide = np.pad(values, edges, mode="edge")
        windows = np.lib.stride_tricks.sliding_window_view(wide, len(weights), axis)
        values = windows @ weights
    return values
