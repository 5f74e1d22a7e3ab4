"""Finds and checks the images: one folder per class, as for torchvision's ImageFolder.

    sample-images/train/CLASS/any-name.png      and the same below val/ and test/

The scripts import their options from this module, so it must not import slow packages.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from megakit.errors import UserError, first, printable, reading

SPLITS = ("train", "val", "test")
REMEDY = "Copy it again, or remove it."
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


@dataclass(kw_only=True)
class FolderOptions:
    """Options that choose the images."""

    data_dir: Path = Path("sample-images")
    """Folder that contains train, val and test, each with one folder of images per class."""

    def fingerprint(self) -> str:
        """Checks the folders, and returns a name with a digest of the images' paths and sizes.

        Raises:
            UserError: A split is missing or empty, has a class without training images, or has a
                file that cannot be read.
        """
        check_folders(self.data_dir)
        listed, problems = [], []
        for path in (path for split in SPLITS for path in list_images(self.data_dir / split)):
            try:
                with reading(path, REMEDY):
                    size = path.stat().st_size
                    listed.append(f"{path.relative_to(self.data_dir)} {size}")
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(first(problems))
        # File names need not be UTF-8: hence fsencode.
        digest = hashlib.sha256(os.fsencode("\n".join(listed))).hexdigest()
        return f"images-{digest[:12]}"

    def check_unchanged(self, dataset: str) -> None:
        """Checks in a rank that the images have not changed since the command started.

        Raises:
            UserError: The images have changed, so the ranks might read different images.
        """
        if self.fingerprint() != dataset:
            raise UserError(
                f"--data-dir {self.data_dir}: changed since this command began. Start the command "
                "again."
            )


def list_classes(folder: Path) -> list[str]:
    """Returns the sorted classes in a split's folder; a class's label is its index in the list."""
    return sorted(path.name for path in folder.glob("*/"))


def list_images(folder: Path) -> list[Path]:
    """Returns the paths of a split's images, sorted by class and name."""
    return sorted(path for path in folder.glob("*/*") if path.suffix.lower() in SUFFIXES)


def check_folders(data_dir: Path) -> None:
    """Checks that each split contains images, and only classes of the training images.

    Raises:
        UserError: A split fails the check; the error lists one problem for each split.
    """
    problems = []
    classes = list_classes(data_dir / "train")
    for split in SPLITS:
        folder = data_dir / split
        if not list_images(folder):
            problems.append(
                f"{folder}: contains no images. --data-dir needs the folders train, val and test, "
                "each with one folder of PNG, JPEG, BMP or WebP files per class."
            )
        elif unknown := set(list_classes(folder)) - set(classes):
            problems.append(
                f"{folder}: has classes that {data_dir / 'train'} lacks: "
                f"{', '.join(sorted(unknown))}. Add training images of these classes, or remove "
                "their folders here."
            )
    if problems:
        raise UserError(map(printable, problems))  # names of folders may have any characters
