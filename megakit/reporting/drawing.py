"""Draws small pictures for TensorBoard with Pillow; importing matplotlib takes half a second.

A picture is uint8 (height, width, 3); the image of a sample is uint8 (height, width). TensorBoard
shows pictures about 350 pixels wide. These pictures are not much wider, so that their text remains
readable.
"""

import math

import numpy as np
from numpy.typing import NDArray

from megakit.reporting.figure_style import BAD, GOOD, INK
from megakit.reporting.predictions import count_confusions

Picture = NDArray[np.uint8]


def rows_of_images(rows: list[Picture], scale: int = 2, gap: int = 4) -> Picture:
    """Draws rows of images of one size below each other; each row is (N, height, width)."""
    lines = [np.concatenate([np.pad(image, gap // 2) for image in row], axis=1) for row in rows]
    grid = np.concatenate(lines)
    return np.repeat(grid.repeat(scale, axis=0).repeat(scale, axis=1)[..., None], 3, axis=2)


def confusion_matrix(
    label: NDArray[np.int64], prediction: NDArray[np.int64], num_classes: int
) -> Picture:
    """Draws how often each label (row) got each prediction (column); frequent cells are darker."""
    from PIL import Image, ImageDraw, ImageFont

    counts, shares = count_confusions(label, prediction, num_classes)
    cell, left, top = 33, 20, 42
    image = Image.new("RGB", (left + num_classes * cell, top + num_classes * cell), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(12)
    draw.text((left + 2, 2), "each row a label, each column a prediction", INK, font)
    colors = np.array([[255, 255, 255], [int(GOOD[i : i + 2], 16) for i in (1, 3, 5)]])
    for number in range(num_classes):
        middle = number * cell + cell // 2
        draw.text((left // 2, top + middle), str(number), INK, font, anchor="mm")
        draw.text((left + middle, top - 10), str(number), INK, font, anchor="mm")
    for (row, column), share in np.ndenumerate(shares):
        x, y = left + column * cell, top + row * cell
        # The square root makes rare mistakes more visible.
        weight = math.sqrt(share)
        color = tuple(map(round, colors[0] * (1 - weight) + colors[1] * weight))
        draw.rectangle((x, y, x + cell - 2, y + cell - 2), fill=color)
        if counts[row, column]:
            ink = "white" if weight > 0.6 else INK
            middle_of_cell = (x + cell // 2, y + cell // 2)
            draw.text(middle_of_cell, str(counts[row, column]), ink, font, anchor="mm")
    return np.asarray(image)


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
