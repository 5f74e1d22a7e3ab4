"""Draws small pictures for TensorBoard with Pillow; importing matplotlib takes half a second.

A picture is uint8 (height, width, 3); the image of a sample is uint8 (height, width). TensorBoard
shows pictures about 350 pixels wide. These pictures are not much wider, so that their text remains
readable.
"""

import math

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
) -> Picture:
    """Draws images (N, height, width) with label, prediction and probability below each image."""
    from PIL import Image, ImageDraw, ImageFont

    scale, line, gap = 2, 14, 12
    height, width = (scale * size for size in images.shape[1:])
    rows = math.ceil(len(images) / columns)
    size = (columns * (width + gap) + gap, rows * (height + line + gap) + gap)
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(11)
    for number, picture in enumerate(images):
        row, column = divmod(number, columns)
        x, y = gap + column * (width + gap), gap + row * (height + line + gap)
        image.paste(Image.fromarray(picture.repeat(scale, axis=0).repeat(scale, axis=1)), (x, y))
        said = f" as {prediction[number]}, {probability[number]:.0%}"
        draw.text((x, y + height + 3), str(label[number]), INK, font)
        draw.text((x + font.getlength(str(label[number])), y + height + 3), said, BAD, font)
    return np.asarray(image)
