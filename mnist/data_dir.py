"""Chooses the folder that contains MNIST's files, and finds the files in a folder.

The choice, in this order: `--data-dir`; the variable MNIST_DATA_DIR; the folder that the run or its
start checkpoint used; `data`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from megakit.errors import UserError, printable, reading

VARIABLE = "MNIST_DATA_DIR"
DEFAULT = Path("data")

MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""The sha256 of the four unpacked files as published by LeCun, Cortes and Burges."""

FOLDERS = ("MNIST/raw", "MNISTCustom/raw")
"""Folders below `data_dir`. torchvision names a dataset's folder after its class."""


def print_to_stderr(line: str) -> None:
    """Prints a line for the user."""
    print(line, file=sys.stderr)


def named_by(option: Path | None) -> str:
    """Returns how the user has named a folder, for messages; empty if no folder is named."""
    value = os.environ.get(VARIABLE)
    return f"--data-dir {option}" if option else f"{VARIABLE}={value}" if value else ""


def used_by(runs: Path) -> dict[Path, str]:
    """Returns the folders that the runs below an output directory remember, the last run first."""
    from megakit.job.run_directory import RunDirectory

    places = {run: RunDirectory(run).places() for run in (runs / "finetune", runs / "pretrain")}
    return {run: paths["data_dir"] for run, paths in places.items() if "data_dir" in paths}


def choose_data_dir(
    named: Path | None,
    used: Mapping[Path, str],
    report: Callable[[str], object] = print_to_stderr,
    default: Path = DEFAULT,
) -> Path:
    """Returns the folder to read MNIST from, or to download MNIST into.

    Args:
        named: The user's `--data-dir`.
        used: The folders of earlier runs by run directory, the first choice first.
        report: Receives one line if the folder of an earlier run has lost its files.
        default: The last choice.
    """
    if named is not None:
        return named
    if value := os.environ.get(VARIABLE):
        return Path(value)
    for run, folder in used.items():
        if folder == str(default.absolute()):
            break
        if holds_mnist(Path(folder)):
            return Path(folder)
        report(f"{printable(folder)}, which {run} used, does not contain MNIST any more.")
    return default


def holds_mnist(data_dir: Path) -> bool:
    """Tells whether a folder contains the four files; their content is not checked."""
    try:
        return locate(data_dir)[1].keys() == MNIST_SHA256.keys()
    except UserError:  # the folder cannot be read
        return False


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
