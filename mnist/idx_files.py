"""Finds, reads, checks and downloads MNIST's four files."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from megakit.errors import UserError, printable, reading

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

DOWNLOAD = """
import socket, sys
from torchvision.datasets import MNIST

socket.setdefaulttimeout(5)  # urllib would wait forever
MNIST(sys.argv[1], download=True)
"""


def read_mnist(data_dir: Path, train: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Reads MNIST's training or test images, and checks the bytes that were read.

    Args:
        data_dir: Folder that contains `MNIST/raw` or `MNISTCustom/raw`.
        train: True for the 60,000 training images, False for the 10,000 test images.

    Returns:
        Images, uint8 (N, 28, 28), and labels, uint8 (N,), both read-only. They are copies in
        memory, so later changes of the files have no effect.

    Raises:
        UserError: A file is missing, cannot be read, or differs from the published file.
    """
    import numpy as np

    part = "train" if train else "t10k"
    images, labels = (
        read_file(data_dir, f"{part}-{name}-ubyte") for name in ("images-idx3", "labels-idx1")
    )
    # Before the values: 4 bytes for type and number of dimensions, and 4 for each dimension.
    return (
        np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28),
        np.frombuffer(labels, np.uint8, offset=8),
    )


def read_file(data_dir: Path, name: str) -> bytes:
    """Reads one of the four files, unpacked, and checks that it is the published one.

    Raises:
        UserError: The file is missing, cannot be read, or differs from the published file.
    """
    folder, paths = locate(data_dir)
    path = paths.get(name, folder / name)
    remedy = "Copy MNIST's file there, or delete what is there: then a script downloads it."
    with reading(path, remedy):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    found = hashlib.sha256(content).hexdigest()
    if found != MNIST_SHA256[name]:
        raise UserError(f"{path}: sha256 {found}, expected {MNIST_SHA256[name]}. {remedy}")
    return content


def locate(data_dir: Path) -> tuple[Path, dict[str, Path]]:
    """Returns the folder of the four files, and the paths of those that exist, by name.

    Raises:
        UserError: The folder cannot be read.
    """
    with reading(data_dir, "Choose a folder that you may read."):
        folders = [data_dir / below for below in FOLDERS]
        folder = next((one for one in folders if one.is_dir()), folders[0])
        # A file without .gz comes last, so that it replaces the same file with .gz.
        files = (folder / f"{name}{suffix}" for name in MNIST_SHA256 for suffix in (".gz", ""))
        return folder, {path.name.removesuffix(".gz"): path for path in files if path.exists()}


def download(names: list[str], folder: Path) -> None:
    """Downloads MNIST with torchvision, and writes those files that are missing in a folder.

    Each file appears in one step after all files were checked: an interrupted download is never
    taken for a whole file, and several jobs can download into one folder. A process of its own
    imports torchvision: torch must not be imported before this process limits its threads.

    Raises:
        OSError: No mirror has all files, or the folder cannot be written.
        UserError: A mirror sent another file.
    """
    with TemporaryDirectory() as scratch:
        command = [sys.executable, "-P", "-c", DOWNLOAD, scratch]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(printable(done.stderr.strip().rpartition("\n")[2]))
        contents = {name: read_file(Path(scratch), name) for name in names}
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as beside:
        for name, content in contents.items():
            written = Path(beside, name)
            written.write_bytes(content)
            written.replace(folder / name)
