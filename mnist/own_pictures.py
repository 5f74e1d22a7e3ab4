"""Reads the user's pictures and converts them to the form of training images: 28x28, ink on 0.

`to_training_form` converts one grey picture of any size to one training image. It computes with
integers, so that an implementation in another language gives equal results. The rest of the module
reads files; `photos.py` cleans photos before the conversion. Numpy and Pillow are imported only
when a file is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megakit.errors import UserError, first, printable, reading
from megakit.runtime.foreign_files import read_regular_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

SIDE = 28
"""Height and width of a training image."""
BOX = 20
"""Length that the longer side of a digit is scaled to, as in MNIST."""
FAINT = 32
"""Smallest difference from the paper's brightness, of 255, that counts as ink."""
MOST_PICTURES = 100_000
"""Largest number of pictures in a folder or an array."""
ARRAY_BYTES = MOST_PICTURES * SIDE * SIDE * 8 + 10_000
"""Largest size of a `.npy` file: the pictures in float64."""
PICTURE_BYTES = 128 << 20
"""Largest size of a picture file."""
MOST_PIXELS, LONGEST_SIDE = 50_000_000, 20_000
"""Largest numbers of pixels of a picture, as the largest common cameras have, and of its side."""
MOST_SCANS = 1000
"""Largest number of scans of a JPEG file. About ten are usual; each takes a picture's time."""
WHAT_TO_NAME = "--input takes a PNG, JPEG or WebP file, a folder of such files, or a .npy array."
MOST_NAMES = 5
"""Largest number of file names in one remark."""


def to_training_form(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Converts a grey picture to the form of MNIST: a centred digit, 20 pixels long, bright on 0.

    All numbers outside floor() are integers below 2^53, so float64 gives the same result on every
    machine. floor((2 * a + b) / (2 * b)) is a / b, rounded half up.

    1. The paper is the median of the outermost rows and columns, with the four corners counted
       twice: of the n sorted pixels, the pixel at index n // 2. If the paper is 128 or more, the
       ink is dark. Then every pixel p becomes 255 - p, and the paper becomes 255 - paper.
    2. A picture has the form already if it has 28x28 pixels, its original paper is below 32, and a
       pixel exceeds the paper by 32. Such a picture is returned unchanged.
    3. Ink is max(p - paper, 0). If all ink is below 32, there is no digit. Ink below an eighth of
       the maximum becomes 0, which removes the noise of a JPEG.
    4. The bounding box of the ink, height x width, is cut out. It is scaled until the longer side
       is 20; the shorter side becomes
       max(1, floor((2 * 20 * shorter + longer) / (2 * longer))). Each new pixel gets the sum s of
       the ink under it; the weight of an old pixel is the area that both pixels share. Lengths are
       integers in units of an old pixel's side divided by the new number of pixels: along a side
       of n old and m new pixels, new pixel i and old pixel j share
       max(0, min((i + 1) * n, (j + 1) * m) - max(i * n, j * m)).
    5. The largest sum t becomes 255; each sum s becomes floor((2 * 255 * s + t) / (2 * t)).
    6. The digit is placed so that its centre of mass, with pixel y at y, is at 14. Its top row
       becomes row floor(14.5 - sum(y * value) / sum(value)), clipped to [0, 28 - height]. The
       columns are placed likewise. All other pixels of the 28x28 are 0.

    Args:
        pixels: uint8 (height, width) of any size, with bright or dark ink.

    Returns:
        uint8 (28, 28).

    Raises:
        ValueError: The picture contains no ink.
    """
    import numpy as np

    paper = paper_of(pixels)
    bright, ground = (255 - pixels, 255 - paper) if paper >= 128 else (pixels, paper)
    ink = np.maximum(bright, ground) - np.uint8(ground)  # in uint8, as pictures may be large
    brightest = int(ink.max())
    if brightest < FAINT:
        raise ValueError("contains no ink")
    if pixels.shape == (SIDE, SIDE) and paper < FAINT:
        return pixels
    ink[ink < -(-brightest // 8)] = 0
    for _ in range(2):  # rows, then columns
        there = np.flatnonzero(ink.any(axis=1))
        ink = ink[there[0] : there[-1] + 1].T

    height, width = ink.shape
    longer = max(ink.shape)
    new_height, new_width = (max(1, (2 * BOX * n + longer) // (2 * longer)) for n in ink.shape)
    sums = _overlaps(height, new_height) @ ink @ _overlaps(width, new_width).T
    digit = np.floor((2 * 255 * sums + sums.max()) / (2 * sums.max()))

    top = _start(digit.sum(axis=1))
    left = _start(digit.sum(axis=0))
    image = np.zeros((SIDE, SIDE), np.uint8)
    image[top : top + new_height, left : left + new_width] = digit
    return image


def paper_of(pixels: NDArray[np.uint8]) -> int:
    """Returns the brightness of a picture's paper; see step 1 of `to_training_form`."""
    import numpy as np

    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    middle = len(border) // 2
    return int(np.partition(border, middle)[middle])


def _overlaps(n: int, m: int) -> NDArray[np.float64]:
    """Returns the lengths that m new pixels share with n old pixels, (m, n); see step 4."""
    import numpy as np

    new, old = np.arange(m)[:, None], np.arange(n)
    ends = np.minimum((new + 1) * n, (old + 1) * m)
    return np.maximum(ends - np.maximum(new * n, old * m), 0).astype(np.float64)


def _start(masses: NDArray[np.float64]) -> int:
    """Returns the first row (or column) of a digit from the masses of its rows; see step 6."""
    import numpy as np

    size = len(masses)
    center = float((np.arange(size) * masses).sum() / masses.sum())
    return int(np.clip(np.floor(14.5 - center), 0, SIDE - size))


# --- Files ----------------------------------------------------------------------------------------


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

    reader = _Reader()
    with reading(f"--input {path}", WHAT_TO_NAME):
        is_folder = path.is_dir()
        files = _list_folder(path) if is_folder else [path]
    if not files:
        reader.refuse(path, "the folder is empty. Put PNG, JPEG or WebP files into it")
    for file in files:
        if file == path and path.suffix == ".npy":
            reader.add_array(path)
        else:
            reader.add_file(file)
    if not reader.images or (reader.problems and not is_folder):
        raise UserError(first(reader.problems))
    images = np.stack(reader.images)
    digest = hashlib.sha256("\n".join(reader.sources).encode() + images.data).hexdigest()
    name = printable(f"{path} (sha256 {digest[:12]})")
    return Pictures(name, images, reader.sources, reader.remarks(len(files)))


def listed(names: list[str]) -> str:
    """Returns the first names of a list, and the number of further names."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


class _Reader:
    """Collects pictures, counts of the changes made to them, and problems."""

    def __init__(self) -> None:
        self.images: list[NDArray[np.uint8]] = []
        self.sources: list[str] = []
        self.changes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.skipped: dict[str, list[str]] = {}

    def refuse(self, what: Path | str, why: str) -> None:
        self.problems.append(printable(f"--input {what}: {why}."))

    def remarks(self, num_files: int) -> list[str]:
        """Returns one line for each kind of change, and for each reason to skip files."""
        total = len(self.images)
        return [
            *(
                f"{count:,} of {total:,} pictures: {change}."
                for change, count in self.changes.items()
            ),
            *(
                f"Skipped {len(names):,} of {num_files:,} files, {why}: {listed(names)}."
                for why, names in self.skipped.items()
            ),
        ]

    def add_file(self, path: Path) -> None:
        """Reads a picture file; the suffix of its name has no effect."""
        num_images, num_problems = len(self.images), len(self.problems)
        with self._collecting(), reading(f"--input {path}", WHAT_TO_NAME):
            pixels, changes = _read_grey(path)
            self._add(path, path.name, pixels, changes, may_be_photo=True)
        if len(self.images) == num_images:
            is_blank = "contains no ink" in self.problems[num_problems]
            why = "which contain no ink" if is_blank else "which cannot be read"
            self.skipped.setdefault(why, []).append(printable(path.name))

    def add_array(self, path: Path) -> None:
        """Reads the pictures of a `.npy` file."""
        rule = f"shape (N > 0, {SIDE}, {SIDE}), and uint8 from 0 to 255 or floats from 0 to 1"
        with self._collecting(), reading(f"--input {path}", f"The array must have {rule}."):
            array, changes = _read_array(path)
            for index, pixels in enumerate(array):
                self._add(f"{path}[{index}]", f"{path.name}[{index}]", pixels, changes)

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self.problems += error.problems

    def _add(
        self,
        what: Path | str,
        source: str,
        pixels: NDArray[np.uint8],
        changes: list[str],
        may_be_photo: bool = False,
    ) -> None:
        from mnist.photos import Cleaned, clean

        paper = paper_of(pixels)
        try:
            cleaned = clean(pixels, paper) if may_be_photo else Cleaned(pixels, paper >= 128)
            image = to_training_form(cleaned.pixels)
        except ValueError as error:
            self.refuse(what, f"{error}: its pixels have nearly equal brightness. Remove it")
            return
        changes = [*changes, *cleaned.changes]
        if image is not pixels:
            if cleaned.is_dark:
                changes.append("inverted, because the ink was dark")
            changes.append(f"scaled to fit {BOX}x{BOX} pixels and centred in {SIDE}x{SIDE}")
        self.images.append(image)
        self.sources.append(printable(source))
        self.changes.update(changes)


def _list_folder(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    if len(files) > MOST_PICTURES:
        raise ValueError(f"more than {MOST_PICTURES:,} files")
    return files


def _read_array(path: Path) -> tuple[NDArray[np.uint8], list[str]]:
    """Reads a `.npy` file; returns uint8 (N, 28, 28) and the changes made."""
    import numpy as np

    array = np.load(io.BytesIO(read_regular_file(path, ARRAY_BYTES)), allow_pickle=False)
    if array.shape[1:] != (SIDE, SIDE) or not 0 < len(array) <= MOST_PICTURES:
        raise ValueError(f"shape {array.shape}")
    if array.dtype == np.uint8:
        return array, []
    if array.dtype.kind != "f":
        raise ValueError(f"numbers of type {array.dtype}")
    low, high = array.min(), array.max()
    if not (low >= 0 and high <= 1):  # also true for NaN
        raise ValueError(f"values from {low:.4g} to {high:.4g}")
    parts = np.array_split(array, 1 + len(array) // 1000)  # float64 of all would use much memory
    whole = [np.floor(part.astype(np.float64) * 255 + 0.5).astype(np.uint8) for part in parts]
    return np.concatenate(whole), ["values from 0 to 1 scaled to 0 to 255"]


def _read_image(path: Path) -> Image:
    """Decodes a picture whose size is accepted, and rotates it by its EXIF orientation."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    content = read_regular_file(path, PICTURE_BYTES)
    remedy = f"scale it down to {MOST_PIXELS:,} pixels at most, and {LONGEST_SIDE:,} a side"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns by limits of its own
        try:
            image = Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "WEBP"))
        except UnidentifiedImageError:  # Pillow's message names the BytesIO object
            raise ValueError("neither PNG nor JPEG nor WEBP") from None
        except Image.DecompressionBombError:  # far above the limit
            raise ValueError(remedy) from None
        width, height = image.size  # of the header; no pixel is decoded yet
        if max(width, height) > LONGEST_SIDE or width * height > MOST_PIXELS:
            raise ValueError(f"{width:,} x {height:,} pixels: {remedy}")
        if image.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > MOST_SCANS:
            raise ValueError(f"more than {MOST_SCANS:,} scans: save it as a plain JPEG")
        ImageOps.exif_transpose(image, in_place=True)
    return image


def _read_grey(path: Path) -> tuple[NDArray[np.uint8], list[str]]:
    """Reads a picture file; returns grey uint8 (height, width) and the changes made."""
    import numpy as np

    image = _read_image(path)
    if image.mode.startswith("I"):  # 16 bits per pixel
        deep = np.asarray(image).astype(np.uint32)
        return ((deep * 255 + 32767) // 65535).astype(np.uint8), ["16 bits per pixel reduced to 8"]
    grey, changes = _without_colour(image)
    if image.has_transparency_data:
        alpha = np.asarray(image.convert("RGBA").getchannel("A"))
        if alpha.min() < 255:
            changes.append("transparent pixels count as paper")
            grey = _on_paper(grey, alpha)
    return grey, changes


def _without_colour(image: Image) -> tuple[NDArray[np.uint8], list[str]]:
    """Returns the brightness of each pixel, and the change if the picture had colour."""
    import numpy as np
    from PIL import ImageChops

    colours = image.convert("RGB")
    red, green, blue = colours.split()
    is_grey = not any(ImageChops.difference(red, other).getbbox() for other in (green, blue))
    return np.asarray(colours.convert("L")), [] if is_grey else ["colours converted to grey"]


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
