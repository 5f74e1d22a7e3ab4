"""Reads scikit-learn's digits, enlarges and splits them, without importing scikit-learn."""

from __future__ import annotations

import hashlib
from importlib.metadata import distribution
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Split = Literal["train", "validation", "test"]


def read_digits(split: Split) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Reads one split of scikit-learn's 1,797 handwritten digits, enlarged from 8x8 pixels.

    The splits never change: 1,297 images for training, 200 for validation, 300 for test. All splits
    have the classes in the same proportions. The images are enlarged with integers only and split
    by sha256. So the result is equal on every machine, with any version of numpy and scikit-learn.

    Returns:
        Images, uint8 (N, 28, 28), and labels, uint8 (N,), both in scikit-learn's order.
    """
    import numpy as np

    # The import of scikit-learn would take a second.
    path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(path), np.int64, delimiter=",")  # 64 pixels from 0 to 16, and the label
    labels = table[:, -1]
    indices = _digits_split(labels, split)
    images = _enlarge(table[indices, :-1].reshape(-1, 8, 8))
    return images, labels[indices].astype(np.uint8)


def _digits_split(labels: NDArray[np.int64], split: Split) -> list[int]:
    """Returns the indices of one split; each class is divided into test, validation, train."""
    order = sorted(range(len(labels)), key=lambda index: hashlib.sha256(b"%d" % index).digest())
    chosen: list[int] = []
    for label in range(10):
        members = [index for index in order if labels[index] == label]
        more = {3: 1, 8: -1}.get(label, 0)  # the most frequent and the rarest digit
        first, second = 30 + more, 50 + 2 * more
        bounds = {"test": (0, first), "validation": (first, second), "train": (second, None)}
        chosen += members[slice(*bounds[split])]
    return sorted(chosen)


def _enlarge(pixels: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Enlarges (N, 8, 8) bilinearly to (N, 28, 28), and scales 0..16 to 0..255.

    In units of the 8 old pixels, the center of new pixel i is at (i + 1/2) * 8/28 - 1/2, which is
    (4 * i - 5) / 14. The weight of an old pixel decreases linearly with the distance to this
    center. All positions and weights are multiplied by 14, so that they are integers.
    """
    import numpy as np

    centers = np.clip(4 * np.arange(28) - 5, 0, 7 * 14)
    weights = np.maximum(14 - np.abs(centers[:, None] - 14 * np.arange(8)), 0)  # (28, 8)
    brightest = 16 * 14 * 14
    images: NDArray[np.int64] = weights @ pixels @ weights.T
    return ((images * 255 + brightest // 2) // brightest).astype(np.uint8)
