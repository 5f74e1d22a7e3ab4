"""Where the images are: a folder for each class, as torchvision's ImageFolder has them.

    sample-images/train/CLASS/any-name.png      and the same below val/ and test/

The scripts take their options from here, so nothing heavy is imported.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megakit.errors import UserError

SPLITS = ("train", "val", "test")
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


@dataclass(kw_only=True)
class FolderOptions:
    """Which images."""

    data_dir: Path = Path("sample-images")
    """Folder that holds train, val and test, each with a folder of images for every class."""

    def resolve_dataset(
        self, previous: Any, report: Callable[[str], None], may_download: bool = True
    ) -> str:
        """Checks the folders, and names what is in them: other images are another dataset.

        Raises:
            UserError: A split is missing or empty, or has other classes than the training images.
        """
        check_folders(self.data_dir)
        paths = [path for split in SPLITS for path in list_images(self.data_dir / split)]
        listed = [f"{path.relative_to(self.data_dir)} {path.stat().st_size}" for path in paths]
        digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()
        return f"images-{digest[:12]}"


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
        raise UserError(problems)
