"""Draws pictures with Pillow; importing matplotlib takes half a second.

A picture is uint8 (height, width, 3); the image of a sample is uint8 (height, width). TensorBoard
shows pictures about 350 pixels wide, so the default sizes are not much larger.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mnist.figure_style import BAD, INK, font_file, percent

Picture = NDArray[np.uint8]


def captioned(
    images: Picture,
    captions: Sequence[Sequence[tuple[str, str]]],
    columns: int,
    scale: int,
    font_size: int,
    title: str = "",
) -> Picture:
    """Draws images (N, height, width) in columns, each with the lines of its caption below.

    A line is a text and its colour. A text that is wider than its image loses its beginning.
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
        for place, (text, color) in enumerate(lines):
            while font.getlength(text) > width:
                text = f"…{text[2:]}"
            draw.text((x, y + height + 3 + place * line), text, color, font)
    return np.asarray(page)


def mistakes(
    images: Picture, predictions: Any, columns: int = 5, scale: int = 2, title: str = ""
) -> Picture:
    """Draws images (N, height, width), ink on 0, with label, prediction and probability.

    Args:
        images: The image of each prediction.
        predictions: The wrong predictions, as `Predictions.mistakes` returns them.
        columns: The number of images in a row.
        scale: The size of a pixel.
        title: A line above the images.
    """
    captions = [
        [(f"{label} as {prediction}", INK), (percent(probability), BAD)]
        for label, prediction, probability in zip(
            predictions.label,
            predictions.prediction,
            predictions.probabilities.max(axis=1),
            strict=True,
        )
    ]
    font_size = scale * images.shape[2] // 5
    return captioned(np.uint8(255) - images, captions, columns, scale, font_size, title)


def pairs(upper: Picture, lower: Picture) -> Picture:
    """Draws images (N, height, width), ink on 0, and below each of them its pair."""
    both = np.uint8(255) - np.concatenate([upper, lower])
    return captioned(both, [()] * len(both), columns=len(upper), scale=3, font_size=11)
