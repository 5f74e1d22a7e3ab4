"""Finds, downloads, checks and reads the images: MNIST, or scikit-learn's digits.

Both datasets are uint8 arrays: images (N, 28, 28), from 0 for background to 255 for ink, and labels
(N,). The scripts import their options from this module, so it must import quickly. Numpy is
imported only when images are read, urllib only when a file is missing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from megakit.errors import UserError, reading
from megakit.runtime.foreign_files import read_regular_file
from mnist.data_dir import DEFAULT, choose_data_dir, locate, print_to_stderr
from mnist.data_dir import MNIST_SHA256 as MNIST_SHA256
from mnist.digits import Split as Split
from mnist.digits import digits_table, unpack
from mnist.digits import read_digits as read_digits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DatasetName = Literal["mnist", "digits"]


@dataclass(kw_only=True)
class DataOptions:
    """Options that choose the images."""

    data_dir: Path | None = None
    """Folder that contains MNIST/raw. Missing files are downloaded to this folder; existing files
    are never changed. By default: the variable MNIST_DATA_DIR, else the folder that the run or its
    start checkpoint used, else data."""

    dataset: Literal["auto", "mnist", "digits"] = "auto"
    """mnist: 60,000 + 10,000 images; downloaded if missing. digits: 1,797 scans from scikit-learn,
    enlarged. auto: the dataset of the run that is resumed, or of the start checkpoint; else mnist
    if it exists or can be downloaded; else digits."""

    def fingerprint(self) -> str:
        """Finds and checks the images, and returns the name of the dataset; see `find_dataset`.

        Without `--data-dir`, sets `data_dir` to the chosen folder, if the dataset is mnist.

        Raises:
            UserError: As in `find_dataset`; or `--dataset` names another dataset than that of the
                start checkpoint.
        """
        earlier: Sequence[Any] = getattr(self, "earlier", ())
        for run in earlier:
            if run.is_start and run.dataset and self.dataset not in ("auto", run.dataset):
                raise UserError(
                    f"--dataset {self.dataset}: the start checkpoint, of {run.path}, was trained "
                    f"on {run.dataset}. Leave --dataset out, or start from a checkpoint that was "
                    f"trained on {self.dataset}."
                )
        previous = next((run.dataset for run in earlier if run.dataset), None)
        if self.dataset == "digits" or (self.dataset == "auto" and previous == "digits"):
            return find_dataset(DEFAULT, "digits")
        say = getattr(self, "say", print_to_stderr)
        used = {run.path: folder for run in earlier if (folder := run.places.get("data_dir"))}
        data_dir = choose_data_dir(self.data_dir, used, say)
        found = find_dataset(data_dir, self.dataset, cast("DatasetName | None", previous), say)
        if found == "mnist":
            self.data_dir = data_dir
        return found


def find_dataset(
    data_dir: Path,
    dataset: Literal["auto", "mnist", "digits"],
    previous: DatasetName | None = None,
    report: Callable[[str], object] = print_to_stderr,
) -> DatasetName:
    """Chooses the dataset, downloads its missing files, and checks all of its files.

    Call this function once per job, before the ranks start; otherwise each rank downloads. Two jobs
    can safely download into one folder at the same time.

    Args:
        data_dir: Folder that contains `MNIST/raw`, or that the files are downloaded into.
        dataset: As in `DataOptions`.
        previous: For `auto`: the dataset of the run that is resumed or of the start checkpoint.
        report: Called with each line that the user should see.

    Returns:
        The name of the dataset, whose files all exist and have the published sha256.

    Raises:
        UserError: MNIST is requested, but files are damaged, or missing and cannot be downloaded.
            The same applies to `auto` if at least one file of MNIST exists: then `auto` does not
            fall back to digits.
    """
    wanted = previous if dataset == "auto" and previous else dataset
    if wanted == "digits":
        digits_table()
        return "digits"

    folder, paths = locate(data_dir)
    if _damages(paths):
        check_mnist(data_dir)  # raises an error that also lists the missing files
    missing = [name for name in MNIST_SHA256 if name not in paths]
    if not missing:
        return "mnist"
    from mnist.downloading import DownloadError, download

    try:
        download({name: _size(name) for name in missing}, folder, report)
        return "mnist"
    except DownloadError as reason:
        if wanted == "auto" and not paths:
            report(
                f"MNIST is not in {folder} and cannot be downloaded ({reason}): using digits, "
                "the 1,797 scans that come with scikit-learn. --data-dir names the folder that "
                "contains MNIST/raw."
            )
            digits_table()
            return "digits"
        source = f" ({previous}, as in the earlier run)" if dataset != wanted else ""
        remedy = "Copy the files there, choose another --data-dir, or choose --dataset digits."
        if previous == "mnist":  # another dataset would be refused
            remedy = "Copy the files there, or choose another --data-dir."
        raise UserError(
            f"--dataset {dataset}{source}: {folder} lacks {', '.join(missing)}, unpacked or as "
            f".gz, and they cannot be downloaded ({reason}). {remedy}"
        ) from None


def read_splits(
    data_dir: Path,
    dataset: str,
    make: Callable[[NDArray[np.uint8], NDArray[np.uint8]], Any],
) -> tuple[Any, Any, Any]:
    """Reads the images for training, validation and test, and returns three datasets.

    Missing files of MNIST are downloaded first, as in the published tutorial. A script calls
    `find_dataset` before its ranks start, so its ranks do not download. MNIST's 60,000 training
    images are split as in NVIDIA BioNeMo's tutorial. The split never changes, so that no script
    validates on images that an earlier script trained on.

    Args:
        data_dir: Folder that contains `MNIST/raw`; digits are read from scikit-learn.
        dataset: Name of the dataset.
        make: Builds a dataset from images (N, 28, 28) and labels (N,).

    Returns:
        The three datasets; of MNIST, the first two are `torch.utils.data.Subset`s of one dataset.

    Raises:
        UserError: A file is missing and cannot be downloaded, cannot be read, or differs from the
            published file.
    """
    if dataset == "digits":
        train, validation, test = (make(*read_digits(part)) for part in get_args(Split))
        return train, validation, test
    if locate(data_dir)[1].keys() != MNIST_SHA256.keys():
        find_dataset(data_dir, "mnist")
    import torch
    from torch.utils.data import random_split

    generator = torch.Generator().manual_seed(42)
    both = make(*read_mnist(data_dir, train=True))
    train, validation = random_split(both, [55000, 5000], generator)
    return train, validation, make(*read_mnist(data_dir, train=False))


# --- MNIST ----------------------------------------------------------------------------------------

REMEDY = (
    "The file is damaged, or it is not MNIST's. Copy it again, or delete it to download it again."
)


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
    if problems := _damages(paths) + missing:
        raise UserError(problems)


def _damages(paths: dict[str, Path]) -> list[str]:
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
    size = _size(name)
    with reading(path, REMEDY):
        content = read_regular_file(path, 2 * size)
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


def _size(name: str) -> int:
    return _header_size(name) + math.prod(_shape(name))


def _missing(folder: Path, name: str) -> str:
    return f"{folder / name}: missing, also as .gz. Copy it there, or let a script download it."
