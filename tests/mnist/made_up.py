"""Files with MNIST's names, format and sizes but other content."""

import math
import struct
from pathlib import Path

import numpy as np

from mnist.files import MNIST_SHA256

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = MNIST_SHA256
SHAPES: dict[str, tuple[int, ...]] = {
    TRAIN_IMAGES: (60_000, 28, 28),
    TRAIN_LABELS: (60_000,),
    TEST_IMAGES: (10_000, 28, 28),
    TEST_LABELS: (10_000,),
}


def made_up(name: str) -> np.ndarray:
    """The images or labels of a file. Image i has i in its first pixels; no two files are alike."""
    shape = SHAPES[name]
    numbers = np.arange(shape[0], dtype="<u4") + (0 if name.startswith("train") else 100_000)
    if "labels" in name:
        return (numbers * 7 // 3 % 10).astype(np.uint8)
    images = np.zeros((shape[0], math.prod(shape[1:])), np.uint8)
    images[:, :4] = numbers.view(np.uint8).reshape(-1, 4)
    images[:, 300:500] = (numbers % 251)[:, None]
    return images.reshape(shape)


def content_of(name: str) -> bytes:
    """A file as LeCun's format has it: type and number of dimensions, sizes, numbers."""
    shape = SHAPES[name]
    return struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape) + made_up(name).tobytes()


def link_files(root: Path, folder: Path, names: tuple[str, ...] = tuple(SHAPES)) -> Path:
    """Makes a folder such as `data/MNIST/raw` of links to a root's files; returns the new root."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).symlink_to(root / "MNIST" / "raw" / name)
    return folder.parents[1]


def replace(path: Path, content: bytes) -> None:
    """Puts a file in the place of a link."""
    path.unlink()
    path.write_bytes(content)


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if not path.is_dir())
