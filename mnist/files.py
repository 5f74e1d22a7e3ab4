"""Chooses between MNIST, whose missing files are downloaded, and scikit-learn's digits.

Both datasets are uint8 arrays: images (N, 28, 28), from 0 for background to 255 for ink, and labels
(N,). The scripts import their options from this module, so it must import quickly. Numpy is
imported only when images are read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from megakit.errors import UserError
from mnist.digits import Split as Split, read_digits as read_digits
from mnist.idx_files import (
    MNIST_SHA256 as MNIST_SHA256,
    download,
    locate,
    read_file,
    read_mnist as read_mnist,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def print_to_stderr(line: str) -> None:
    """Prints a line for the user."""
    print(line, file=sys.stderr)


def named_folder(option: Path | None = None) -> Path | None:
    """Returns the folder that `--data-dir` or else the variable MNIST_DATA_DIR names, if any."""
    value = os.environ.get("MNIST_DATA_DIR")
    return option or (Path(value) if value else None)


@dataclass(kw_only=True)
class DataOptions:
    """Options that choose the images."""

    data_dir: Path | None = None
    """Folder that contains MNIST/raw. Missing files are downloaded to this folder; existing files
    are never changed. By default: the variable MNIST_DATA_DIR, else data."""

    dataset: Literal["auto", "mnist", "digits"] = "auto"
    """mnist: 60,000 + 10,000 images; downloaded if missing. digits: 1,797 scans from scikit-learn,
    enlarged. auto: the dataset of the start checkpoint; else mnist if --data-dir or MNIST_DATA_DIR
    names a folder; else the dataset of the run that is resumed; else mnist if it exists or can be
    downloaded; else digits."""

    def fingerprint(self) -> str:
        """Finds and checks the images, and returns the name of the dataset; see `find_dataset`.

        Sets `data_dir` to the folder that the user names; None if no folder is named, or not read.

        Raises:
            UserError: As in `find_dataset`; or `--dataset` names another dataset than that of the
                start checkpoint.
        """
        say = getattr(self, "say", print_to_stderr)
        # `CommonOptions` has these two, the programs of ladder/ have neither.
        start, run = getattr(self, "start_dataset", None), getattr(self, "run_dataset", None)
        asked: Any = self.dataset
        if start and asked not in ("auto", start):
            raise UserError(
                f"--dataset {asked}: the start checkpoint was trained on {start}. Leave --dataset "
                f"out, or start from a checkpoint that was trained on {asked}."
            )
        folder = named_folder(self.data_dir)
        if asked == "auto":
            asked = start or ("mnist" if folder else run or "auto")
        if folder and asked == start == "digits":
            say(f"{folder} is not read: the start checkpoint was trained on digits.")
        found = find_dataset(folder or Path("data"), asked, say)
        self.data_dir = folder if found == "mnist" else None
        return found


def find_dataset(
    data_dir: Path,
    dataset: Literal["auto", "mnist", "digits"],
    say: Callable[[str], object] = print_to_stderr,
) -> str:
    """Chooses the dataset, downloads its missing files, and checks all of its files.

    Call this function once per job, before the ranks start; otherwise each rank downloads.

    Args:
        data_dir: Folder that contains `MNIST/raw`, or that the files are downloaded into.
        dataset: `mnist`, `digits`, or `auto`: digits if no file of MNIST exists and none can be
            downloaded.
        say: Called with each line that the user should see.

    Returns:
        The name of the dataset, whose files all exist and have the published sha256.

    Raises:
        UserError: Files of MNIST are damaged, or missing and cannot be downloaded.
    """
    if dataset == "digits":
        return "digits"
    folder, paths = locate(data_dir)
    for name in paths:
        read_file(data_dir, name)
    missing = [name for name in MNIST_SHA256 if name not in paths]
    if not missing:
        return "mnist"
    try:
        download(missing, folder)
    except (OSError, UserError) as reason:
        if dataset == "auto" and not paths:
            say(
                f"MNIST is not in {folder} and cannot be downloaded ({reason}): using digits, "
                "the 1,797 scans that come with scikit-learn. --data-dir names the folder that "
                "contains MNIST/raw."
            )
            return "digits"
        raise UserError(
            f"{folder} lacks {', '.join(missing)}, unpacked or as .gz, and they cannot be "
            f"downloaded ({reason}). Copy the files there, or name the folder that contains "
            "MNIST/raw with --data-dir or MNIST_DATA_DIR."
        ) from None
    say(f"Downloaded MNIST to {folder}.")
    return "mnist"


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
    if len(locate(data_dir)[1]) < len(MNIST_SHA256):
        find_dataset(data_dir, "mnist")
    import torch
    from torch.utils.data import random_split

    generator = torch.Generator().manual_seed(42)
    both = make(*read_mnist(data_dir, train=True))
    train, validation = random_split(both, [55000, 5000], generator)
    return train, validation, make(*read_mnist(data_dir, train=False))
