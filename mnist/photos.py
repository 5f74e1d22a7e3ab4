"""Cleans a photo of a digit: removes uneven light, noise, specks and the lines of the paper.

A photo becomes the form that `training_form.to_training_form` expects: ink on 0. The steps are:

1. The photo is shrunk until its longer side has about 300 pixels.
2. The brightness of the paper is estimated at each pixel: what is left when features as narrow as
   strokes are closed. The ink at a pixel is the relative difference between pixel and paper.
3. Lines across the whole photo are removed.
4. Pixels below a part of the ink's level, or within the noise, are removed.
5. Connected parts that are small, or that reach the photo's edge, are removed. An empty sheet has
   only remains of its lines, the edge of a shadow or of a table, or shade: it contains no ink.
6. Thin strokes are thickened to the width of MNIST's strokes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage  # type: ignore[import-untyped]

from mnist.paper_lines import remove_lines
from mnist.training_form import has_ink_beyond

Plane = NDArray[np.float32]
Mask = NDArray[np.bool_]

#: Pictures whose longer side has at most this many pixels are drawings, not photos.
SMALL = 40
#: About the longer side of the shrunken photo, and of the image that the paper is estimated on.
LONGER_SIDE, COARSE_SIDE = 300, 80
#: Smallest shorter side of a shrunken photo.
SHORTEST = 8
#: Largest width of a stroke, as a share of the photo's longer side.
REACH = 0.3
#: Smallest brightness of paper, because the ink is relative to it.
DARKEST = 16
#: Smallest relative difference between ink and paper, and smallest difference on even paper: as
#: much as a line of one pixel has after a drawing of 4,000 pixels was shrunk.
LEAST_INK, LEAST_STEP = 0.12, 16
#: Share of the ink's level that is the edge of a stroke; standard deviations of noise below it.
EDGE, NOISE = 0.4, 3.5
#: Largest share of a digit's pixels on lines of the paper: digits have up to 0.3, remains of lines
#: from 0.8.
MOST_ON_LINES = 0.5
#: Smallest length of a photo's digit, as a share of the photo's longer side. Smallest change of ink
#: from pixel to pixel at its edges, as a share of the ink's level: blurred digits
#: have 0.045 and more, shade has up to 0.032.
SHORTEST_DIGIT, SOFTEST = 0.025, 0.04
#: Largest share of a side of a photo that a digit covers; a table covers more.
MOST_OF_A_SIDE = 0.6
#: Smallest part of a digit, as a share of the ink of the largest part.
LEAST_PART = 0.05
#: Largest distance of a part from the largest part, as a share of the largest part's length.
NEAR = 0.35
#: Width of a stroke, of a digit of 100 pixels, below which strokes are thickened, and their width
#: then: half of MNIST's digits have 11.5 to 16.
THIN, USUAL = 8.0, 12.0


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
    factor = max(1, round(max(pixels.shape) / LONGER_SIDE))
    grey = np.asarray(Image.fromarray(pixels).reduce(factor))
    if max(pixels.shape) <= SMALL or min(grey.shape) < SHORTEST:
        return untouched
    is_even = _is_even(grey, paper)
    ink, is_dark = _ink_on_even_paper(grey, paper) if is_even else _ink_on_any_paper(grey)
    ink, level, noise = _measured(ink, is_even)
    edge = max(EDGE * level, NOISE * noise)
    without, on_line, num_lines = remove_lines(ink, level, noise)
    if num_lines <= 2 and (without > edge).sum() < 0.1 * (ink > edge).sum():
        without, on_line, num_lines = ink, np.zeros_like(on_line), 0  # a 1 from edge to edge
    least = level / 8 if is_even else edge  # `to_training_form` keeps an eighth of the ink
    is_digit = main_parts(without > least, without)
    bright = grey if is_dark else np.uint8(255) - grey
    of_lines = on_line[is_digit].mean() > MOST_ON_LINES
    if of_lines or without[~on_line].max(initial=0) < LEAST_INK:
        raise ValueError("contains no ink")
    if (num_lines or not is_even) and not _has_strokes(
        is_digit, without / level, bright, num_lines > 2
    ):
        raise ValueError("contains no ink")
    made, is_thickened = thickened(_with_smooth_edges(np.where(is_digit, without, 0), edge))
    found = {
        "uneven light and noise of the paper removed": not is_even,
        "lines of the paper removed": num_lines > 0,
        "ink beside the digit removed": is_even and has_ink_beyond(is_digit, pixels, paper),
        "thin strokes thickened": is_thickened,
    }
    changes = tuple(change for change, happened in found.items() if happened)
    if not changes and is_dark == untouched.is_dark:
        return untouched
    return Cleaned(made, is_dark, changes)


# --- Ink and paper --------------------------------------------------------------------------------


def _is_even(grey: NDArray[np.uint8], paper: int) -> bool:
    """Returns whether many pixels have the brightness of the border, as in a drawing or a scan."""
    away = np.abs(grey.astype(np.int16) - paper)
    border = np.concatenate([away[0], away[-1], away[:, 0], away[:, -1]])
    is_drawn = (away == 0).mean() >= 0.2 and (border == 0).mean() >= 0.5
    is_scanned = (away <= 2).mean() >= 0.5 and (border <= 16).mean() >= 0.9
    return bool(is_drawn or is_scanned)


def _ink_on_even_paper(grey: NDArray[np.uint8], paper: int) -> tuple[Plane, bool]:
    """Returns the ink at each pixel, as a share of the largest possible, and whether it is dark.

    Raises:
        ValueError: The picture contains no ink.
    """
    is_dark = paper - int(grey.min()) >= int(grey.max()) - paper
    difference = grey.astype(np.float32) - paper
    if np.abs(difference).max() < LEAST_STEP:
        raise ValueError("contains no ink")
    most = paper if is_dark else 255 - paper  # 0 only if every pixel is paper
    return (-difference if is_dark else difference) / np.float32(max(most, 1)), is_dark


def _ink_on_any_paper(grey: NDArray[np.uint8]) -> tuple[Plane, bool]:
    """Returns the ink at each pixel of a photo, relative to the paper, and whether it is dark."""
    is_dark = _has_dark_ink(grey)
    factor = max(1, round(max(grey.shape) / COARSE_SIDE))
    coarse = np.asarray(Image.fromarray(grey).reduce(factor), np.float32)
    close = ndimage.grey_closing if is_dark else ndimage.grey_opening
    size = max(3, round(REACH * max(coarse.shape)) | 1)
    paper = Image.fromarray(close(ndimage.gaussian_filter(coarse, 0.8), size, mode="nearest"))
    shape = (paper.width * factor, paper.height * factor)
    smooth = np.asarray(paper.resize(shape, Image.Resampling.BILINEAR))
    smooth = np.maximum(smooth[: grey.shape[0], : grey.shape[1]], DARKEST)
    return (1 - grey / smooth if is_dark else grey / smooth - 1), is_dark


def _has_dark_ink(grey: NDArray[np.uint8]) -> bool:
    """Returns whether the ink is darker than a plane through the brightness of the paper."""
    values = grey[::3, ::3].astype(np.float64)
    y, x = np.mgrid[: values.shape[0], : values.shape[1]] / max(values.shape)
    terms = np.stack([np.ones_like(y), y, x]).reshape(3, -1).T
    flat = values.ravel()
    away = np.abs(flat - np.median(flat))
    for _ in range(4):  # without what differs most, such as the ink and a table beside the paper
        kept = away <= np.quantile(away, 0.6)
        plane = np.linalg.lstsq(terms[kept], flat[kept], rcond=None)[0]
        away = np.abs(flat - terms @ plane)
    darkest, brightest = np.quantile(flat - terms @ plane, [0.004, 0.996])
    return bool(-darkest >= brightest)


def _measured(ink: Plane, is_even: bool) -> tuple[Plane, float, float]:
    """Returns the ink with 0 on paper and with less noise, the ink's level, and the noise.

    Raises:
        ValueError: The picture contains no ink.
    """
    level = float(np.quantile(ink, 1 if is_even else 0.998))
    on_paper = ink[ink <= max(level / 2, ink.min())]
    middle = 0.0 if is_even else float(np.median(on_paper))
    noise = float(1.4826 * np.median(np.abs(on_paper - middle)))
    ink, level = ink - np.float32(middle), level - middle
    if level < max(LEAST_INK, 5 * noise):
        raise ValueError("contains no ink")
    if noise > level / 15:
        return ndimage.gaussian_filter(ink, 1.2, mode="nearest"), level, noise / 3
    return ink, level, noise


def _with_smooth_edges(ink: Plane, edge: float) -> Plane:
    """Scales ink to a range from 0 to 1, with smooth edges of the strokes."""
    strong = ink[ink > edge]
    level = float(np.quantile(strong, 0.7) if strong.size else ink.max())
    return np.clip((ink / level - EDGE / 2) / EDGE, 0, 1)


# --- Parts and strokes ----------------------------------------------------------------------------


def _has_strokes(digit: Mask, ink: Plane, grey: NDArray[np.uint8], has_lines: bool) -> bool:
    """Returns whether a photo's digit is no speck, no edge of a shadow or a table, and no shade.

    Args:
        digit: The pixels of the digit, (height, width).
        ink: Ink at each pixel, about 1 in strokes.
        grey: The photo, shrunk; the ink is dark.
        has_lines: Whether the paper has lines.
    """
    ((rows, columns),) = ndimage.find_objects(digit.astype(int))
    length = max(rows.stop - rows.start, columns.stop - columns.start)
    at_sides = [side.mean() for side in (digit[0], digit[-1], digit[:, 0], digit[:, -1])]
    # Next to the edge of a shadow, a part of the paper is as dark as the edge.
    near, far = (ndimage.binary_dilation(digit, iterations=number) for number in (2, 5))
    beside, inside = grey[far & ~near], np.median(grey[digit])
    dark, light = np.quantile(beside, [0.35, 0.75]) if beside.size else (inside, inside)
    is_shadow = dark - inside <= (light - inside) / 4
    is_cut = max(at_sides) > MOST_OF_A_SIDE or (max(at_sides) > 0 and (has_lines or is_shadow))
    steps = ndimage.gaussian_gradient_magnitude(ink, 1.5)[digit]
    is_sharp = np.quantile(steps, 0.9) > SOFTEST
    return bool(length >= SHORTEST_DIGIT * max(digit.shape) and not is_cut and is_sharp)


def ink_of_parts(mask: Mask, ink: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Labels the connected parts of a mask from 1; returns the labels, and the ink of each part."""
    labels, number = ndimage.label(mask, np.ones((3, 3)))  # also at a corner
    return labels, np.asarray(ndimage.sum_labels(ink, labels, np.arange(1, number + 1)))


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
    near = ndimage.binary_dilation(mask, np.ones((3, 3)))
    labels, masses = ink_of_parts(near, np.where(mask, ink, 0))
    if not masses.size:
        raise ValueError("contains no ink")
    boxes = ndimage.find_objects(labels)
    top, bottom, left, right = np.array([(y.start, y.stop, x.start, x.stop) for y, x in boxes]).T
    height, width = mask.shape
    at_rows = (top <= 1) | (bottom >= height - 1)
    at_columns = (left <= 1) | (right >= width - 1)
    # A table beside the paper reaches a corner, and has much more ink than the digit.
    ranked = masses
    for at_edge, share in ((at_rows & at_columns, 0.02), (at_rows | at_columns, 0.15)):
        inner = np.where(at_edge, 0, ranked)
        if inner.max() > share * ranked.max():
            ranked = inner
    main = int(ranked.argmax())
    away_y = np.maximum(top - bottom[main], top[main] - bottom) + 1
    away_x = np.maximum(left - right[main], left[main] - right) + 1
    reach = NEAR * (max(bottom[main] - top[main], right[main] - left[main]) - 1)
    kept = (np.maximum(away_y, away_x) <= reach) & (ranked >= LEAST_PART * ranked[main])
    return np.append(False, kept)[labels]


def thickened(ink: Plane) -> tuple[NDArray[np.uint8], bool]:
    """Cuts out a digit, and thickens its strokes if they are thinner than MNIST's.

    Args:
        ink: Ink from 0 to 1, (height, width).

    Returns:
        uint8 with margins of 0, and whether strokes were thickened.
    """
    (box,) = ndimage.find_objects((ink > 0.2).astype(int))
    cut = np.pad(ink[box], 1)
    scale = 100 / max(cut.shape)
    shape = (max(1, round(cut.shape[1] * scale)), max(1, round(cut.shape[0] * scale)))
    image = Image.fromarray((255 * cut + 0.5).astype(np.uint8))
    digit = np.pad(np.asarray(image.resize(shape, Image.Resampling.BICUBIC)), 8)
    mask = digit > 127
    edge = mask & ~ndimage.binary_erosion(mask)
    width = 2 * mask.sum() / max(edge.sum(), 1)
    if width >= THIN:
        return digit, False
    radius = (USUAL - width) / 2
    reach = np.arange(-int(radius) - 1, int(radius) + 2)
    disk = np.hypot(reach[:, None], reach) <= radius
    return ndimage.grey_dilation(digit, footprint=disk), True
