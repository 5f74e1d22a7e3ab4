"""Converts a grey picture of any size to the form of training images: 28x28, ink on 0.

It computes with integers, so that the script of the report's page, in JavaScript, gives equal
results.
"""

import numpy as np
from numpy.typing import NDArray

from mnist.own_pictures import BOX, SIDE

#: Pixels around the box of a digit in a shrunken photo, in which ink belongs to the digit.
MARGIN = 2
#: Smallest difference from the paper's brightness, of 255, that counts as ink.
FAINT = 32


def to_training_form(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Converts a grey picture to the form of MNIST: a centred digit, 20 pixels long, bright on 0.

    All numbers outside floor() are integers below 2^53, so float64 gives the same result on every
    machine. floor((2 * a + b) / (2 * b)) is a / b, rounded half up.

    1. The paper is the median of the outermost rows and columns, with the four corners counted
       twice: of the n sorted pixels, the pixel at index n // 2. If the paper is 128 or more, the
       ink is dark. Then every pixel p becomes 255 - p, and the paper becomes 255 - paper.
    2. A picture has the form already if it has 28x28 pixels, its original paper is below 32, and a
       pixel exceeds the paper by 32. Such a picture is returned unchanged.
    3. Ink is max(p - paper, 0). If all ink is below 32, there is no digit. Ink below an eighth of
       the maximum becomes 0, which removes the noise of a JPEG.
    4. The bounding box of the ink, height x width, is cut out. It is scaled until the longer side
       is 20; the shorter side becomes
       max(1, floor((2 * 20 * shorter + longer) / (2 * longer))). Each new pixel gets the sum s of
       the ink under it; the weight of an old pixel is the area that both pixels share. Lengths are
       integers in units of an old pixel's side divided by the new number of pixels: along a side
       of n old and m new pixels, new pixel i and old pixel j share
       max(0, min((i + 1) * n, (j + 1) * m) - max(i * n, j * m)).
    5. The largest sum t becomes 255; each sum s becomes floor((2 * 255 * s + t) / (2 * t)).
    6. The digit is placed so that its centre of mass, with pixel y at y, is at 14. Its top row
       becomes row floor(14.5 - sum(y * value) / sum(value)), clipped to [0, 28 - height]. The
       columns are placed likewise. All other pixels of the 28x28 are 0.

    Args:
        pixels: uint8 (height, width) of any size, with bright or dark ink.

    Returns:
        uint8 (28, 28).

    Raises:
        ValueError: The picture contains no ink.
    """
    paper = paper_of(pixels)
    bright, ground = (255 - pixels, 255 - paper) if paper >= 128 else (pixels, paper)
    ink = np.maximum(bright, ground) - np.uint8(ground)  # in uint8, as pictures may be large
    brightest = int(ink.max())
    if brightest < FAINT:
        raise ValueError("contains no ink")
    if pixels.shape == (SIDE, SIDE) and paper < FAINT:
        return pixels
    ink[ink < -(-brightest // 8)] = 0
    for _ in range(2):  # rows, then columns
        there = np.flatnonzero(ink.any(axis=1))
        ink = ink[there[0] : there[-1] + 1].T

    height, width = ink.shape
    longer = max(ink.shape)
    new_height, new_width = (max(1, (2 * BOX * n + longer) // (2 * longer)) for n in ink.shape)
    sums = _overlaps(height, new_height) @ ink @ _overlaps(width, new_width).T
    digit = np.floor((2 * 255 * sums + sums.max()) / (2 * sums.max()))

    top = _start(digit.sum(axis=1))
    left = _start(digit.sum(axis=0))
    image = np.zeros((SIDE, SIDE), np.uint8)
    image[top : top + new_height, left : left + new_width] = digit
    return image


def has_ink_beyond(digit: NDArray[np.bool_], pixels: NDArray[np.uint8], paper: int) -> bool:
    """Returns whether a picture has ink beyond the digit's box: specks, or noise before shrinking.

    Args:
        digit: The digit in the shrunken picture.
        pixels: The picture. Its ink is defined as in `to_training_form`.
        paper: Median brightness of the picture's border.
    """
    bright, ground = (255 - pixels, 255 - paper) if paper >= 128 else (pixels, paper)
    ink = np.maximum(bright, ground) - np.uint8(ground)
    is_ink = ink >= max(1, -(-int(ink.max()) // 8))
    for axis in (0, 1):
        there = np.flatnonzero(is_ink.any(axis=1 - axis))
        inside = np.flatnonzero(digit.any(axis=1 - axis))
        factor = -(-pixels.shape[axis] // digit.shape[axis])
        first, last = (inside[0] - MARGIN) * factor, (inside[-1] + 1 + MARGIN) * factor
        if not there.size or there[0] < first or there[-1] >= last:
            return True
    return False


def paper_of(pixels: NDArray[np.uint8]) -> int:
    """Returns the brightness of a picture's paper; see step 1 of `to_training_form`."""
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    middle = len(border) // 2
    return int(np.partition(border, middle)[middle])


def _overlaps(n: int, m: int) -> NDArray[np.float64]:
    """Returns the lengths that m new pixels share with n old pixels, (m, n); see step 4."""
    new, old = np.arange(m)[:, None], np.arange(n)
    ends = np.minimum((new + 1) * n, (old + 1) * m)
    return np.maximum(ends - np.maximum(new * n, old * m), 0).astype(np.float64)


def _start(masses: NDArray[np.float64]) -> int:
    """Returns the first row (or column) of a digit from the masses of its rows; see step 6."""
    size = len(masses)
    center = float((np.arange(size) * masses).sum() / masses.sum())
    return int(np.clip(np.floor(14.5 - center), 0, SIDE - size))
