"""Where the images are: a folder for each class, as torchvision's ImageFolder has them.

    sample-images/train/CLASS/any-name.png      and the same below val/ and test/

The scripts take their options from here, so nothing heavy is imported.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megakit.data.foreign_images import FILE_BYTES
from megakit.errors import UserError
from megakit.runtime.foreign_files import first, printable, reading, regular_file_size

SPLITS = ("train", "val", "test")
REMEDY = "Copy it again, or remove it."
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


@dataclass(kw_only=True)
class FolderOptions:
    """Which images."""

    data_dir: Path = Path("sample-images")
    """Folder that holds train, val and test, each with a folder of images for every class."""

    #: What the images are counts, by the name that `resolve_dataset` gives.
    harmless: ClassVar[tuple[str, ...]] = ("data_dir",)

    def resolve_dataset(
        self, previous: Any, report: Callable[[str], None], may_download: bool = True
    ) -> str:
        """Checks the folders, and names what is in them: other images are another dataset.

        Raises:
            UserError: A split is missing or empty, or has other classes than the training images.
        """
        check_folders(self.data_dir)
        listed, problems = [], []
        for path in (path for split in SPLITS for path in list_images(self.data_dir / split)):
            try:
                with reading(path, REMEDY):
                    size = regular_file_size(path, FILE_BYTES)
                    listed.append(f"{path.relative_to(self.data_dir)} {size}")
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(first(problems))
        # fsencode: names need not be UTF-8.
        digest = hashlib.sha256(os.fsencode("\n".join(listed))).hexdigest()
        return f"images-{digest[:12]}"

    def check_unchanged(self, dataset: str) -> None:
        """Checks in a rank that the images are those that the command found at its start.

        Raises:
            UserError: They are others; the ranks might differ in what they read.
        """
        if self.resolve_dataset(None, print) != dataset:
            raise UserError(
                f"--data-dir {self.data_dir}: changed since this command began. Start it again."
            )


def list_classes(folder: Path) -> list[str]:
    """Names of the classes below a split's folder; a class's label is its place in this list."""
    return sorted(path.name for path in folder.glob("*/"))


def list_images(folder: Path) -> list[Path]:
    """All images of a split, class by class, always in the same order."""
    return sorted(path for path in folder.glob("*/*") if path.suffix.lower() in SUFFIXES)


def check_folders(data_dir: Path) -> None:
    """Checks that all splits hold images of the same classes.

    Raises:
        UserError: They do not; with one problem for each split.
    """
    problems = []
    classes = list_classes(data_dir / "train")
    for split in SPLITS:
        folder = data_dir / split
        if not list_images(folder):
            problems.append(
                f"{folder}: holds no images. --data-dir needs train, val and test, each with a "
                "folder of PNG or JPEG files for every class."
            )
        elif unknown := set(list_classes(folder)) - set(classes):
            problems.append(
                f"{folder}: has classes that {data_dir / 'train'} has not: "
                f"{', '.join(sorted(unknown))}. Add images of them there, or remove these."
            )
    if problems:
        raise UserError(map(printable, problems))  # classes are named by whoever made the folders
