"""Reads the user's pictures, and converts them to the form of training images: 28x28, ink on 0.

`photos.py` cleans photos, and `training_form.py` converts. Numpy and Pillow are imported only when
a file is read.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megakit.errors import UserError, first, printable, reading

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    #: Pixels, uint8 (height, width), and the changes made to them.
    Loaded: TypeAlias = tuple[NDArray[np.uint8], list[str]]

#: Height and width of a training image, and the length of a digit in it, as in MNIST.
SIDE, BOX = 28, 20
#: Largest number of pictures in a folder or an array.
MOST_PICTURES = 100_000
#: Largest size of a `.npy` file: the pictures in float64.
ARRAY_BYTES = MOST_PICTURES * SIDE * SIDE * 8 + 10_000
#: Largest size of a picture file.
PICTURE_BYTES = 128 << 20
#: Largest number of pixels of a picture, as the largest common cameras have, and of a side.
MOST_PIXELS, LONGEST_SIDE = 50_000_000, 20_000
#: Largest number of scans of a JPEG; about ten are usual, and each takes a picture's time.
MOST_SCANS = 1000
WHAT_TO_NAME = "--input takes a PNG, JPEG or WebP file, a folder of such files, or a .npy array."
#: Largest number of file names in one remark.
MOST_NAMES = 5


@dataclass(frozen=True)
class Pictures:
    """The user's pictures in the form of training images.

    Attributes:
        name: Identifies the pictures: the path, and a digest of images and sources.
        images: uint8 (N, 28, 28).
        sources: The source of each picture: a file name, or an array element (`ones.npy[3]`).
        remarks: One line for each kind of change, with the number of pictures.
    """

    name: str
    images: NDArray[np.uint8]
    sources: list[str]
    remarks: list[str]

    @property
    def labels(self) -> NDArray[np.int64]:
        """Returns the label -1, for an unknown class, for each picture."""
        import numpy as np

        return np.full(len(self.images), -1)


def read_pictures(path: Path) -> Pictures:
    """Reads a PNG, JPEG or WebP file, the files of a folder, or a `.npy` array (N, 28, 28).

    Args:
        path: A file or a folder. The files of a folder are read in the order of their names;
            hidden files are skipped. Files that are no pictures, and pictures without ink, are
            skipped with a remark. An array contains uint8 from 0 to 255, or floats from 0 to 1.

    Raises:
        UserError: The named file, an element of the array, or every file of the folder cannot be
            used. The error lists the first problems, by file or element.
    """
    import numpy as np

    images: list[NDArray[np.uint8]] = []
    sources: list[str] = []
    problems: list[str] = []
    changes: Counter[str] = Counter()
    skipped: dict[str, list[str]] = {}
    with reading(f"--input {path}", WHAT_TO_NAME):
        is_folder = path.is_dir()
        files = _list_folder(path) if is_folder else [path]
        if not files:
            raise UserError(
                printable(
                    f"--input {path}: the folder is empty. Put PNG, JPEG or WebP files into it."
                )
            )
    is_array = path.suffix == ".npy" and not is_folder
    items, scaled = _read_array(path) if is_array else (files, [])
    for number, item in enumerate(items):
        element = f"[{number}]" if is_array else ""
        file = path if is_array else item
        what, source = f"{file}{element}", f"{file.name}{element}"
        why = "which cannot be read"
        try:
            with reading(f"--input {what}", WHAT_TO_NAME):
                pixels, made = (item, scaled) if is_array else _read_grey(item)
                why = "which contain no ink"
                image, more = _convert(what, pixels, may_be_photo=not is_array)
        except UserError as error:
            problems += error.problems
            skipped.setdefault(why, []).append(printable(source))
            continue
        images.append(image)
        sources.append(printable(source))
        changes.update([*made, *more])
    if not images or (problems and not is_folder):
        raise UserError(first(problems))
    digest = hashlib.sha256("\n".join(sources).encode() + np.stack(images).data).hexdigest()
    remarks = [
        f"{count:,} of {len(images):,} pictures: {change}." for change, count in changes.items()
    ]
    remarks += [
        f"Skipped {len(names):,} of {len(files):,} files, {why}: {listed(names)}."
        for why, names in skipped.items()
    ]
    name = printable(f"{path} (sha256 {digest[:12]})")
    return Pictures(name, np.stack(images), sources, remarks)


def listed(names: list[str]) -> str:
    """Returns the first names of a list, and the number of further names."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _list_folder(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    if len(files) > MOST_PICTURES:
        raise ValueError(f"more than {MOST_PICTURES:,} files")
    return files


def _read_array(path: Path) -> tuple[Any, list[str]]:
    """Reads a `.npy` file; returns uint8 (N, 28, 28) and the changes made."""
    import numpy as np

    rule = f"shape (N > 0, {SIDE}, {SIDE}), and uint8 from 0 to 255 or floats from 0 to 1"
    with reading(f"--input {path}", f"The array must have {rule}."):
        array = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
        if array.shape[1:] != (SIDE, SIDE) or not 0 < len(array) <= MOST_PICTURES:
            raise ValueError(f"shape {array.shape}")
        if array.dtype == np.uint8:
            return array, []
        if array.dtype.kind != "f":
            raise ValueError(f"numbers of type {array.dtype}")
        low, high = array.min(), array.max()
        if not (low >= 0 and high <= 1):  # also true for NaN
            raise ValueError(f"values from {low:.4g} to {high:.4g}")
    # One picture after the other: float64 of all would use much memory.
    whole = [np.floor(each.astype(np.float64) * 255 + 0.5).astype(np.uint8) for each in array]
    return whole, ["values from 0 to 1 scaled to 0 to 255"]


def _convert(what: str, pixels: NDArray[np.uint8], may_be_photo: bool) -> Loaded:
    """Returns a picture in the form of training images, and the changes made."""
    from mnist.photos import Cleaned, clean
    from mnist.training_form import paper_of, to_training_form

    paper = paper_of(pixels)
    try:
        cleaned = clean(pixels, paper) if may_be_photo else Cleaned(pixels, paper >= 128)
        image = to_training_form(cleaned.pixels)
    except ValueError as error:
        raise UserError(
            printable(
                f"--input {what}: {error}, only paper, its lines or shadows. Remove it, or take "
                "the photo again, with paper on all sides of the digit."
            )
        ) from error
    changes = [*cleaned.changes]
    if image is not pixels:
        if cleaned.is_dark:
            changes.append("inverted, because the ink was dark")
        changes.append(f"scaled to fit {BOX}x{BOX} pixels and centred in {SIDE}x{SIDE}")
    return image, changes


def _read_grey(path: Path) -> Loaded:
    """Reads a picture file; returns grey uint8 (height, width) and the changes made."""
    import numpy as np
    from PIL import ImageChops

    image = _read_image(path)
    if image.mode.startswith("I"):  # 16 bits per pixel
        deep = np.asarray(image).astype(np.uint32)
        return ((deep * 255 + 32767) // 65535).astype(np.uint8), ["16 bits per pixel reduced to 8"]
    changes = []
    colours = image.convert("RGB")
    red, green, blue = colours.split()
    if any(ImageChops.difference(red, other).getbbox() for other in (green, blue)):
        changes.append("colours converted to grey")
    grey = np.asarray(colours.convert("L"))
    if image.has_transparency_data:
        alpha = np.asarray(image.convert("RGBA").getchannel("A"))
        if alpha.min() < 255:
            changes.append("transparent pixels count as paper")
            grey = _on_paper(grey, alpha)
    return grey, changes


def _read_image(path: Path) -> Image:
    """Decodes a picture whose size is accepted, and rotates it by its EXIF orientation."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    remedy = f"scale it down to {MOST_PIXELS:,} pixels at most, and {LONGEST_SIDE:,} a side"
    content = io.BytesIO(path.read_bytes())
    with warnings.catch_warnings(action="ignore"):  # Pillow warns by limits of its own
        try:
            image = Image.open(content, formats=("PNG", "JPEG", "WEBP"))
        except UnidentifiedImageError:  # Pillow's message names the BytesIO object
            raise ValueError("neither PNG nor JPEG nor WEBP") from None
        except Image.DecompressionBombError:  # far above the limit
            raise ValueError(remedy) from None
        width, height = image.size  # of the header; no pixel is decoded yet
        if max(width, height) > LONGEST_SIDE or width * height > MOST_PIXELS:
            raise ValueError(f"{width:,} x {height:,} pixels: {remedy}")
        if image.format in ("JPEG", "MPO") and content.getvalue().count(b"\xff\xda") > MOST_SCANS:
            raise ValueError(f"more than {MOST_SCANS:,} scans: save it as a plain JPEG")
        ImageOps.exif_transpose(image, in_place=True)
    return image


def _on_paper(grey: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Replaces transparent pixels by paper that contrasts with the ink.

    If more than half of the pixels are opaque, the opaque part is the paper, and its median is the
    paper's brightness. Otherwise the opaque part is the ink: dark ink gets white paper, light ink
    gets black paper.
    """
    import numpy as np

    opaque = grey[alpha >= 128]
    middle = int(np.median(opaque)) if opaque.size else 0
    paper = middle if 2 * opaque.size > grey.size else 255 * (middle < 128)
    ink, alpha = grey.astype(np.uint16), alpha.astype(np.uint16)  # 255 * 255 + 127 fits uint16
    return ((ink * alpha + paper * (255 - alpha) + 127) // 255).astype(np.uint8)
