"""Finds and reads MNIST's four files, and checks that they are the published ones."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

from megakit.errors import UserError, reading
from mnist.digits import unpack

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""The sha256 of the four unpacked files as published by LeCun, Cortes and Burges."""

FOLDERS = ("MNIST/raw", "MNISTCustom/raw")
"""Folders below `data_dir`. torchvision names a dataset's folder after its class."""

REMEDY = (
    "The file is damaged, or it is not MNIST's. Copy it again, or delete it to download it again."
)


def locate(data_dir: Path) -> tuple[Path, dict[str, Path]]:
    """Returns the folder that has most of the four files, and the paths of its files by name.

    Raises:
        UserError: The folder cannot be read.
    """
    candidates = []
    for folder in (data_dir / below for below in FOLDERS):
        rule = f"--data-dir is the folder that contains {FOLDERS[0]}. Choose one that you may read."
        with reading(folder, rule):
            try:
                there = {path.name for path in folder.iterdir()}
            except FileNotFoundError:
                there = set()
        paths = {
            name: folder / (name if name in there else f"{name}.gz")
            for name in MNIST_SHA256
            if name in there or f"{name}.gz" in there
        }
        candidates.append((folder, paths))
    return max(candidates, key=lambda candidate: len(candidate[1]))


def read_mnist(data_dir: Path, train: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Reads MNIST's training or test images, and checks the bytes that were read.

    Args:
        data_dir: Folder that contains `MNIST/raw` or `MNISTCustom/raw`.
        train: True for the 60,000 training images, False for the 10,000 test images.

    Returns:
        Images, uint8 (N, 28, 28), read-only; and labels, uint8 (N,). Both are copies in memory, so
        later changes of the files have no effect.

    Raises:
        UserError: A file is missing, cannot be read, or differs from the published file.
    """
    import numpy as np

    folder, paths = locate(data_dir)
    part = "train" if train else "t10k"
    names = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
    if missing := [_missing(folder, name) for name in names if name not in paths]:
        raise UserError(missing)

    images, labels = (
        np.frombuffer(_content(name, paths[name]), np.uint8, offset=_header_size(name))
        for name in names
    )
    return images.reshape(_shape(names[0])), labels.copy()


def check_mnist(data_dir: Path) -> None:
    """Checks that the four files exist and have the published sizes and sha256.

    Raises:
        UserError: Files are missing or differ; the error lists one problem for each file.
    """
    folder, paths = locate(data_dir)
    missing = [_missing(folder, name) for name in MNIST_SHA256 if name not in paths]
    if problems := damages(paths) + missing:
        raise UserError(problems)


def damages(paths: dict[str, Path]) -> list[str]:
    """Returns one problem for each file that differs from the published file."""
    from concurrent.futures import ThreadPoolExecutor

    def damage(name: str) -> list[str]:
        try:
            _content(name, paths[name])
        except UserError as error:
            return error.problems
        return []

    with ThreadPoolExecutor() as threads:  # reading, unpacking and hashing release the GIL
        return [problem for problems in threads.map(damage, paths) for problem in problems]


def _content(name: str, path: Path) -> bytes:
    """Reads and unpacks a file, and checks that its content equals the published file."""
    size = unpacked_size(name)
    with reading(path, REMEDY):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = unpack(content, size)
    if len(content) != size:
        raise UserError(f"{path}: {len(content):,} bytes, expected {size:,}. {REMEDY}")
    found = hashlib.sha256(content).hexdigest()
    if found != MNIST_SHA256[name]:
        raise UserError(f"{path}: sha256 {found}, expected {MNIST_SHA256[name]}. {REMEDY}")
    return content


def _shape(name: str) -> tuple[int, ...]:
    count = 60_000 if name.startswith("train") else 10_000
    return (count, 28, 28) if "images" in name else (count,)


def _header_size(name: str) -> int:
    """Returns the header's size: 4 bytes for type and number of dimensions, 4 per dimension."""
    return 4 + 4 * len(_shape(name))


def unpacked_size(name: str) -> int:
    """Returns the size in bytes of one of the four files, unpacked."""
    return _header_size(name) + math.prod(_shape(name))


def _missing(folder: Path, name: str) -> str:
    return f"{folder / name}: missing, also as .gz. Copy it there, or let a script download it."
