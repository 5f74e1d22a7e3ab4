"""Draws pictures with Pillow; importing matplotlib takes half a second.

A picture is uint8 (height, width, 3); the image of a sample is uint8 (height, width). TensorBoard
shows pictures about 350 pixels wide, so the default sizes are not much larger.
"""

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mnist.figure_style import BAD, INK, font_file, percent

Picture = NDArray[np.uint8]
#: A line of text below an image: texts with their colours.
Line = Sequence[tuple[str, str]]


def rows_of_images(rows: list[Picture], scale: int = 2, gap: int = 4) -> Picture:
    """Draws rows of images of one size below each other; each row is (N, height, width)."""
    lines = [np.concatenate([np.pad(image, gap // 2) for image in row], axis=1) for row in rows]
    grid = np.concatenate(lines)
    return np.repeat(grid.repeat(scale, axis=0).repeat(scale, axis=1)[..., None], 3, axis=2)


def captioned(
    images: Picture,
    captions: Sequence[Sequence[Line]],
    columns: int,
    scale: int,
    font_size: int,
    title: str = "",
) -> Picture:
    """Draws images (N, height, width) in columns, each with the lines of its caption below.

    A text that is wider than its image loses its middle.
    """
    from PIL import Image, ImageDraw, ImageFont

    height, width = (scale * size for size in images.shape[1:])
    font = ImageFont.truetype(font_file(), font_size)
    line, gap = font_size * 4 // 3, max(12, width // 8)
    rows, step = math.ceil(len(images) / columns), line * max(map(len, captions)) + gap + height
    top = gap + (2 * line if title else 0)
    title_width = round(max(map(font.getlength, title.split("\n"))))
    size = (max(columns * (width + gap), title_width + gap) + gap, rows * step + top)
    page = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(page)
    draw.text((gap, gap), title, INK, font)
    for number, (image, lines) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(number, columns)
        x, y = gap + column * (width + gap), top + row * step
        page.paste(Image.fromarray(image.repeat(scale, axis=0).repeat(scale, axis=1)), (x, y))
        for place, pieces in enumerate(lines):
            left = float(x)
            for text, color in pieces:
                shown = _fitted(text, font, width)
                draw.text((left, y + height + 3 + place * line), shown, color, font)
                left += font.getlength(shown)
    return np.asarray(page)


def _fitted(text: str, font: Any, width: int) -> str:
    """Replaces the middle of a text that is wider than `width` pixels by `...`."""
    half, short = min(len(text) // 2, 100), text
    while font.getlength(short) > width and half > 1:
        half -= 1
        short = f"{text[:half]}...{text[-half:]}"
    return short


def mistakes(
    images: Picture,
    label: NDArray[np.int64],
    prediction: NDArray[np.int64],
    probability: NDArray[np.float64],
    columns: int = 5,
    scale: int = 2,
    title: str = "",
) -> Picture:
    """Draws images (N, height, width) with label, prediction and probability below each image."""
    captions = [
        [[(str(of_image), INK), (f" as {predicted}", BAD)], [(percent(share), BAD)]]
        for of_image, predicted, share in zip(label, prediction, probability, strict=True)
    ]
    font_size = max(11, scale * images.shape[2] // 8)
    return captioned(images, captions, columns, scale, font_size, title)


def shrunk(images: NDArray[Any], largest: int) -> NDArray[Any]:
    """Leaves out rows and columns of images (N, height, width) with more than `largest` of them."""
    stride = math.ceil(max(images.shape[1:]) / largest)
    return images[:, ::stride, ::stride]


def dark_on_light(images: NDArray[Any]) -> Picture:
    """Scales each of N images of numbers (N, height, width) to uint8; its maximum becomes black."""
    images = np.asarray(images, np.float64)  # unsigned integers would overflow
    low, high = (extreme(images, axis=(1, 2), keepdims=True) for extreme in (np.min, np.max))
    return (255 * (high - images) / np.maximum(high - low, 1e-9)).round().astype(np.uint8)


def to_png(picture: Picture) -> bytes:
    """Returns a picture, or a grey image, as PNG data."""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(picture).save(content, "PNG")
    return content.getvalue()
