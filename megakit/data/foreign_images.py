"""Reads pictures and arrays that anybody may have made, within bounds that are checked first.

Numpy and Pillow are imported only when there is something to read.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from megakit.runtime.foreign_files import read_regular_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

MOST_FILES = 100_000
"""Files in a folder of pictures, and pictures in an array."""
FILE_BYTES = 128 << 20
"""Size of a picture's file."""
PIXELS = 50_000_000
"""Pixels of a picture: what the largest common cameras make."""
SIDE = 20_000
"""Height or width of a picture, in pixels."""
SCANS = 1000
"""Scans of a JPEG picture, each of which is decoded in the size of the whole; some ten are usual.
A video that a phone appends to a JPEG file can contain the same bytes and is counted too."""


def list_folder(folder: Path) -> list[Path]:
    """Lists a folder in the order of names, without hidden files.

    Raises:
        OSError: The folder cannot be read.
        ValueError: It holds more than `MOST_FILES`.
    """
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > MOST_FILES:
                raise ValueError(f"more than {MOST_FILES:,} files")
    return [folder / name for name in sorted(names) if not name.startswith(".")]


def read_image(path: Path, formats: tuple[str, ...] = ("PNG", "JPEG")) -> Image:
    """Decodes a picture, turned as its camera says; of an animation, the first frame.

    Args:
        path: A regular file, or a link to one.
        formats: Pillow's names of the formats that are accepted, whatever the file's name.

    Raises:
        ValueError: It has none of the formats, or is too large.
        Exception: It cannot be read or is damaged; Pillow lets through whatever its decoders
            stumble over.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    content = read_regular_file(path, FILE_BYTES)
    bound = f"scale it down to {PIXELS:,} pixels at most, and {SIDE:,} a side"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow's own bounds, which are wider
        try:
            file = Image.open(io.BytesIO(content), formats=formats)
        except UnidentifiedImageError:  # whose own message names an object in memory
            raise ValueError(f"neither {' nor '.join(formats)}") from None
        except Image.DecompressionBombError:
            raise ValueError(bound) from None
        width, height = file.size
        if max(width, height) > SIDE or width * height > PIXELS:
            raise ValueError(f"{width:,} x {height:,} pixels: {bound}")
        if file.format != "PNG" and content.count(b"\xff\xda") > SCANS:
            raise ValueError(f"more than {SCANS:,} scans: save it as a plain JPEG")
        ImageOps.exif_transpose(file, in_place=True)
    return file


def read_array(path: Path, shape: tuple[int, ...], limit: int) -> NDArray[np.generic]:
    """Reads a `.npy` file of uint8 or floats, by the size that its header promises.

    Args:
        path: A regular file, or a link to one.
        shape: Of the array without its first dimension, which may be up to `MOST_FILES`.
        limit: Bytes that the file may have at most.

    Returns:
        The array, read-only. No memory is used beyond the file's content.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has another shape or type, or another size than its header says.
        Exception: Its header is damaged; numpy lets through what its parser stumbles over.
    """
    import numpy as np

    content = read_regular_file(path, limit)
    file = io.BytesIO(content)
    found, is_fortran, dtype = _read_header(file)
    if found[1:] != shape or not 0 < found[0] <= MOST_FILES:
        raise ValueError(f"shape {found}")
    if dtype != np.uint8 and dtype.kind != "f":
        raise ValueError(f"numbers of type {dtype}")
    size = dtype.itemsize * int(np.prod(found, dtype=object))
    rest = len(content) - file.tell()
    if rest != size:
        raise ValueError(f"{rest:,} bytes of numbers, expected {size:,}")
    numbers = np.frombuffer(content, dtype, offset=file.tell())
    return numbers.reshape(found, order="F" if is_fortran else "C")


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """Shape, order and type of the array in a `.npy` file."""
    from numpy.lib import format as npy_format

    npy: Any = npy_format

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of headers that Python 2 wrote
        version = npy.read_magic(file)
        if version == (1, 0):
            return npy.read_array_header_1_0(file)
        if version == (2, 0):
            return npy.read_array_header_2_0(file)
    raise ValueError(f"format version {version[0]}.{version[1]}, which plain arrays do not need")
