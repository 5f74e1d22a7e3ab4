"""Reads the user's pictures, and converts them as MNIST was made: 28x28, bright ink on 0."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from scipy import ndimage  # type: ignore[import-untyped]

from megakit.errors import UserError, first, printable, reading

#: Height and width of a training image, and the length of a digit in it.
SIDE, BOX = 28, 20
#: About the longer side of a picture once it is shrunk.
LONGER_SIDE = 400
#: Largest width of a stroke, as a share of the picture's longer side.
WIDEST_STROKE = 0.5
#: Smallest difference between ink and paper, as a share of the paper's brightness, or of
#: its darkness if the ink is bright.
LEAST_INK = 0.15
#: Share of the strongest ink from which a pixel is part of a stroke.
THRESHOLD = 0.4
RULE = (
    "--input takes a PNG, JPEG or WebP file, a folder of such files, or a .npy array of shape "
    f"(N, {SIDE}, {SIDE}), of uint8 or of floats from 0 to 1. Each picture has one digit."
)


@dataclass(frozen=True)
class Pictures:
    """The user's pictures in the form of training images.

    Attributes:
        name: Identifies the pictures: the path, and a digest of images and sources.
        images: uint8 (N, 28, 28).
        sources: The source of each picture: a file name, or an array element (`ones.npy[3]`).
        remarks: Lines for the console: how many pictures were converted, and which were skipped.
    """

    name: str
    images: NDArray[np.uint8]
    sources: list[str]
    remarks: list[str]

    @property
    def labels(self) -> NDArray[np.int64]:
        """Returns the label -1, for an unknown class, for each picture."""
        return np.full(len(self.images), -1)


def read_pictures(path: Path) -> Pictures:
    """Reads a PNG, JPEG or WebP file, the files of a folder, or a `.npy` array (N, 28, 28).

    The files of a folder are read in the order of their names, without hidden files. A file of a
    folder that is no picture, or contains no ink, is skipped with a remark.

    Raises:
        UserError: The named file, an element of the array, or every file of the folder cannot be
            used.
    """
    items: dict[str, Any] = {str(path): path}
    with reading(f"--input {path}", RULE):
        if path.is_dir():
            items = {str(file): file for file in sorted(path.glob("[!.]*"))}
        elif path.suffix == ".npy":
            items = {f"{path}[{number}]": image for number, image in enumerate(_read_array(path))}
        if not items:
            raise ValueError("no picture is in it")
    images, sources = [], []
    skipped: dict[str, str] = {}
    num_converted = 0
    for what, item in items.items():
        source = printable(Path(what).name)
        try:
            with reading(f"--input {what}", RULE):
                grey = _read_grey(item) if isinstance(item, Path) else item
                images.append(to_training_form(grey))
        except UserError as error:
            skipped[source] = str(error)
        else:
            sources.append(source)
            num_converted += images[-1] is not grey
    if not images or (skipped and not path.is_dir()):
        raise UserError(first([*skipped.values()]))
    stacked = np.stack(images)
    digest = hashlib.sha256("\n".join(sources).encode() + stacked.data).hexdigest()
    remarks = [f"Pictures converted to the form of MNIST: {num_converted:,} of {len(images):,}."]
    if skipped:
        names = ", ".join(first([*skipped]))
        remarks.append(f"Skipped, no picture or no ink: {names}")
    return Pictures(printable(f"{path} (sha256 {digest[:12]})"), stacked, sources, remarks)


def _read_array(path: Path) -> NDArray[np.uint8]:
    """Reads a `.npy` file as uint8 (N, 28, 28)."""
    array: NDArray[Any] = np.load(path, allow_pickle=False)
    if array.shape[1:] != (SIDE, SIDE):
        raise ValueError(f"shape {array.shape}")
    if array.dtype.kind == "f" and ((array >= 0) & (array <= 1)).all():
        array = np.round(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise ValueError(f"{array.dtype} from {array.min()} to {array.max()}")
    return array


def _read_grey(path: Path) -> NDArray[np.uint8]:
    """Reads a picture file as grey uint8 (height, width); what is transparent becomes paper."""
    image = ImageOps.exif_transpose(Image.open(path, formats=("PNG", "JPEG", "WEBP")))
    if image.mode.startswith("I"):  # 16 bits per pixel, which Pillow would clip
        return (np.asarray(image) // 257).astype(np.uint8)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        opaque = np.asarray(image.convert("L"))[np.asarray(image)[..., 3] >= 128]
        paper = Image.new("RGBA", image.size, "white" if np.median(opaque) < 128 else "black")
        image = Image.alpha_composite(paper, image)
    return np.asarray(image.convert("L"))


def to_training_form(grey: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the digit of a picture (height, width), with dark or bright ink, as uint8 (28, 28).

    A picture that has the form of MNIST's images already is returned itself.

    Raises:
        ValueError: The picture contains no ink.
    """
    border = np.median(_border(grey))
    if grey.shape == (SIDE, SIDE) and border < 32 <= grey.max():
        return grey
    small = Image.fromarray(grey).reduce(max(1, round(max(grey.shape) / LONGER_SIDE)))
    longer = max(small.size)
    page = ndimage.gaussian_filter(np.asarray(small, np.float32), longer / LONGER_SIDE)
    # The digit may cover most of the picture, and a table beside the paper most of its border.
    paper = max(border, np.median(page))
    if paper < (page.min() + page.max()) / 2:
        page = 255 - page
    # The paper around a stroke: what is left when dark features as narrow as strokes are filled.
    size = round(WIDEST_STROKE * longer)
    beyond = np.pad(page, size, "edge")  # else a shadow at the edge would be filled, too
    paper = ndimage.grey_closing(beyond, size)[size:-size, size:-size]
    ink = (paper - page) / np.maximum(paper, 255 - paper)
    if ink.max() < LEAST_INK:
        raise ValueError("contains no ink")

    # Parts of a broken stroke are joined if they are nearer than a twentieth of the picture.
    is_ink = ink > THRESHOLD * ink.max()
    near = ndimage.binary_dilation(is_ink, np.ones((3, 3)), max(1, longer // 40))
    parts, number = ndimage.label(near)
    masses = ndimage.sum_labels(ink * is_ink, parts, np.arange(number + 1))
    masses[_border(parts)] *= 0.1  # these may be the edge of a table
    is_digit = parts == masses.argmax()
    (box,) = ndimage.find_objects((is_digit & is_ink).astype(int))
    return _centred(np.where(is_digit, ink, 0)[box])


def _border(pixels: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])


def _centred(digit: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Scales a digit to 20 pixels, and puts its centre of mass at the centre of an image."""
    height, width = (max(1, round(BOX * n / max(digit.shape))) for n in digit.shape)
    scaled = Image.fromarray(digit).resize((width, height), Image.Resampling.BOX)
    values = np.asarray(scaled) * 255 / max(scaled.getextrema())
    image = np.zeros((SIDE, SIDE), np.uint8)
    y, x = (
        int(np.clip(SIDE / 2 + 0.5 - centre, 0, SIDE - size))
        for centre, size in zip(ndimage.center_of_mass(values), values.shape, strict=True)
    )
    image[y : y + height, x : x + width] = np.round(values)
    return image
