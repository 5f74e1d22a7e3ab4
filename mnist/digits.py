"""Reads scikit-learn's digits, enlarges and splits them, without importing scikit-learn."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megakit.errors import UserError, reading

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Split = Literal["train", "validation", "test"]

GZIP = 31
"""Value of zlib's `wbits` for data with a gzip header."""
DIGITS_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
"""The sha256 of scikit-learn's digits.csv.gz, unpacked."""
DIGITS_BYTES = 1 << 20
"""Upper bound on the size of digits.csv.gz, packed or unpacked."""


def read_digits(split: Split) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Reads one split of scikit-learn's 1,797 handwritten digits, enlarged from 8x8 pixels.

    The splits never change: 1,297 images for training, 200 for validation, 300 for test. All splits
    have the classes in the same proportions. The images are enlarged with integers only and split
    by sha256. So the result is equal on every machine, with any version of numpy and scikit-learn.

    Args:
        split: Name of the split.

    Returns:
        Images, uint8 (N, 28, 28), and labels, uint8 (N,), both in scikit-learn's order.

    Raises:
        UserError: scikit-learn is not installed, or its digits have changed.
    """
    import numpy as np

    table = np.loadtxt(digits_table(), np.int64, delimiter=",")  # 64 pixels from 0 to 16, label
    labels = table[:, -1]
    indices = _digits_split(labels, split)
    images = _enlarge(table[indices, :-1].reshape(-1, 8, 8))
    return images, labels[indices].astype(np.uint8)


def digits_table() -> list[str]:
    """Reads the lines of digits.csv.gz, without importing scikit-learn, which takes a second."""
    from importlib.util import find_spec

    spec = find_spec("sklearn")
    places = (spec and spec.submodule_search_locations) or ["scikit-learn (not installed)"]
    path = Path(places[0], "datasets", "data", "digits.csv.gz")
    remedy = (
        "--dataset digits reads this file of scikit-learn. Install scikit-learn again, or choose "
        "--dataset mnist."
    )
    with reading(path, remedy):
        text = unpack(path.read_bytes(), DIGITS_BYTES)
    found = hashlib.sha256(text).hexdigest()
    if found != DIGITS_SHA256:
        raise UserError(f"{path}: sha256 {found}, expected {DIGITS_SHA256}. {remedy}")
    return text.decode().splitlines()


def _digits_split(labels: NDArray[np.int64], split: Split) -> NDArray[np.int64]:
    """Returns the indices of one split; each class is divided into test, validation, train."""
    import numpy as np

    def in_proportion(total: int) -> NDArray[np.int64]:
        """Divides `total` among the classes by size; the largest remainders are rounded up."""
        shares, rests = np.divmod(np.bincount(labels) * total, len(labels))
        shares[np.argsort(-rests, kind="stable")[: total - shares.sum()]] += 1
        return shares

    order = sorted(range(len(labels)), key=lambda index: hashlib.sha256(b"%d" % index).digest())
    drawn = []
    sizes = zip(in_proportion(300), in_proportion(200), strict=True)
    for label, (num_test, num_validation) in enumerate(sizes):
        members = np.array([index for index in order if labels[index] == label])
        test, validation, train = np.split(members, [num_test, num_test + num_validation])
        drawn.append({"test": test, "validation": validation, "train": train}[split])
    return np.sort(np.concatenate(drawn))


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


def unpack(packed: bytes, limit: int) -> bytes:
    """Unpacks one gzip file in memory, up to `limit` bytes.

    Raises:
        ValueError: The content exceeds `limit`, is truncated, or is followed by further bytes.
        zlib.error: The content is damaged or is not gzip.
    """
    unpacker = zlib.decompressobj(wbits=GZIP)
    content = unpacker.decompress(packed, limit + 1)  # bounds the memory that a zip bomb uses
    if len(content) > limit:
        raise ValueError(f"unpacks to more than {limit:,} bytes")
    if not unpacker.eof:
        raise ValueError("ends before the end of its gzip stream")
    if unpacker.unused_data:
        raise ValueError("has further bytes after its gzip stream")
    return content
