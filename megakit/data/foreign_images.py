"""Reads pictures and arrays from untrusted files; checks their sizes before decoding.

Numpy and Pillow are imported only when a file is read.
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

# The largest accepted numbers.
MOST_FILES = 100_000  # files in a folder of pictures; pictures in an array
FILE_BYTES = 128 << 20  # bytes of a picture file
PIXELS = 50_000_000  # pixels of a picture, as the largest common cameras have
SIDE = 20_000  # pixels of a picture's height or width
# Scans of a JPEG picture. Usual are about ten; decoding each scan takes the time of a whole
# picture. Scan markers in a video that a phone appends to a JPEG file are counted, too.
SCANS = 1000
WEBP_PIXELS = 25_000_000  # pixels of a WebP picture: decoding a pixel takes more memory
SCALE_DOWN = "scale it down to {:,} pixels at most, and {:,} a side"


def list_folder(folder: Path) -> list[Path]:
    """Lists a folder's entries in the order of their names, without hidden ones.

    Raises:
        OSError: The folder cannot be read.
        ValueError: The folder contains more than `MOST_FILES` entries.
    """
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > MOST_FILES:
                raise ValueError(f"more than {MOST_FILES:,} files")
    return [folder / name for name in sorted(names) if not name.startswith(".")]


def read_image(path: Path, formats: tuple[str, ...] = ("PNG", "JPEG", "WEBP")) -> Image:
    """Decodes a picture and rotates it by its EXIF orientation; reads an animation's first frame.

    Args:
        path: A regular file, or a link to a regular file.
        formats: Pillow's names of the accepted formats. The suffix of the name has no effect.

    Raises:
        ValueError: The file has none of the formats, or the picture is too large.
        Exception: The file cannot be read or is damaged; Pillow's decoders raise exceptions of any
            type.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    content = read_regular_file(path, FILE_BYTES)
    if "WEBP" in formats:  # Pillow's decoder of WebP allocates the pixels when it opens a file
        _check_size(*_webp_size(content), WEBP_PIXELS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns by its own, larger limits
        try:
            file = Image.open(io.BytesIO(content), formats=formats)
        except UnidentifiedImageError:  # Pillow's message names the BytesIO object
            raise ValueError(f"neither {' nor '.join(formats)}") from None
        except Image.DecompressionBombError:
            raise ValueError(SCALE_DOWN.format(PIXELS, SIDE)) from None
        _check_size(*file.size, PIXELS)
        if file.format not in ("PNG", "WEBP") and content.count(b"\xff\xda") > SCANS:
            raise ValueError(f"more than {SCANS:,} scans: save it as a plain JPEG")
        ImageOps.exif_transpose(file, in_place=True)
    return file


def _check_size(width: int, height: int, most: int) -> None:
    """Raises a `ValueError` if a picture has more than `most` pixels, or a side is too long."""
    if max(width, height) > SIDE or width * height > most:
        raise ValueError(f"{width:,} x {height:,} pixels: {SCALE_DOWN.format(most, SIDE)}")


def _webp_size(content: bytes) -> tuple[int, int]:
    """Reads width and height from the header of a WebP file; returns (0, 0) for other files.

    The decoder refuses a file whose frames are larger than the header says.
    """
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP":
        return 0, 0
    kind, numbers = content[12:16], content[20:30]

    def whole(first: int, length: int) -> int:
        return int.from_bytes(numbers[first : first + length], "little")

    if kind == b"VP8X":  # 3 bytes each, after 4 bytes of flags
        return whole(4, 3) + 1, whole(7, 3) + 1
    if kind == b"VP8L":  # 14 bits each, after one byte
        return (whole(1, 4) & 0x3FFF) + 1, (whole(1, 4) >> 14 & 0x3FFF) + 1
    return whole(6, 2) & 0x3FFF, whole(8, 2) & 0x3FFF  # VP8, after 6 bytes


def read_array(path: Path, shape: tuple[int, ...], limit: int) -> NDArray[np.generic]:
    """Reads a `.npy` file of uint8 or floats, and checks its size against its header.

    Args:
        path: A regular file, or a link to a regular file.
        shape: Shape of the array without the first dimension. The first dimension is between 1 and
            `MOST_FILES`.
        limit: Largest size of the file, in bytes.

    Returns:
        The array, read-only. It uses the memory of the file's content, without a copy.

    Raises:
        OSError: The file cannot be read.
        ValueError: The array has another shape or type, or the file's size contradicts its header.
        Exception: The header is damaged; numpy's parser raises exceptions of several types.
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
    """Reads shape, order (True for Fortran) and type from the header of a `.npy` file."""
    from numpy.lib import format as npy_format

    npy: Any = npy_format

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns about headers written by Python 2
        version = npy.read_magic(file)
        if version == (1, 0):
            return npy.read_array_header_1_0(file)
        if version == (2, 0):
            return npy.read_array_header_2_0(file)
    raise ValueError(f"format version {version[0]}.{version[1]}, which plain arrays do not need")
