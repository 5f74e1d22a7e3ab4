"""Draws pictures with Pillow; importing matplotlib takes half a second.

A picture is uint8 (height, width, 3); the image of a sample is uint8 (height, width). TensorBoard
shows pictures about 350 pixels wide, so the default sizes are not much larger.
"""

import io
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.reporting.figure_style import BAD, INK

Picture = NDArray[np.uint8]


def rows_of_images(rows: list[Picture], scale: int = 2, gap: int = 4) -> Picture:
    """Draws rows of images of one size below each other; each row is (N, height, width)."""
    lines = [np.concatenate([np.pad(image, gap // 2) for image in row], axis=1) for row in rows]
    grid = np.concatenate(lines)
    return np.repeat(grid.repeat(scale, axis=0).repeat(scale, axis=1)[..., None], 3, axis=2)


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
    from PIL import Image, ImageDraw, ImageFont

    height, width = (scale * size for size in images.shape[1:])
    font = ImageFont.load_default(max(11, width // 8))
    line, gap = max(14, width // 6), max(12, width // 8)
    top = gap + (2 * line if title else 0)
    rows = math.ceil(len(images) / columns)
    size = (columns * (width + gap) + gap, rows * (height + line + gap) + top)
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    draw.text((gap, gap), title, INK, font)
    for number, picture in enumerate(images):
        row, column = divmod(number, columns)
        x, y = gap + column * (width + gap), top + row * (height + line + gap)
        image.paste(Image.fromarray(picture.repeat(scale, axis=0).repeat(scale, axis=1)), (x, y))
        # Rounded down: only a probability of 1 is 100%.
        said = f" as {prediction[number]}, {math.floor(100 * probability[number])}%"
        draw.text((x, y + height + 3), str(label[number]), INK, font)
        draw.text((x + font.getlength(str(label[number])), y + height + 3), said, BAD, font)
    return np.asarray(image)


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
