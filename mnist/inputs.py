"""Shows what the classifier saw of a user's pictures: `inputs.png`, and remarks on odd pictures."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megakit.reporting import drawing
from megakit.reporting.figure_style import BAD, INK
from mnist.own_pictures import SIDE, listed
from mnist.photos import LEAST_PART, ink_of_parts

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

    Font = FreeTypeFont | ImageFont

MOST_DRAWN = 60
"""Largest number of pictures in `inputs.png`."""
COVERAGE = (0.035, 0.3)
"""Smallest and largest mean of an image's pixels; 99.8% of MNIST's images are between."""
MOST_PARTS = 2
"""Largest number of connected parts of a digit; more than 99.8% of MNIST's images have no more."""
LEAST_PROBABILITY = 0.7
"""Smallest probability of the answer; 95% of the test images have more."""
COLUMNS = 6
SCALE = 5
CELL = SIDE * SCALE
LINE = 19


@dataclass(frozen=True)
class Answer:
    """The prediction for a picture, and its probability."""

    digit: str
    probability: float


def read_answers(predictions: Path) -> list[Answer]:
    """Reads the answers from predictions.csv, in the order of the rows."""
    with predictions.open(newline="", encoding="utf-8") as file:
        return [
            Answer(row["prediction"], float(row[f"p{row['prediction']}"]))
            for row in csv.DictReader(file)
        ]


def oddities(image: NDArray[np.uint8], answer: Answer) -> list[str]:
    """Returns how an image and its answer differ from MNIST's test images; none for most.

    Args:
        image: uint8 (28, 28), as the classifier saw it.
        answer: The prediction.
    """
    coverage = float(image.mean()) / 255
    masses = ink_of_parts(image > 64, image)[1]
    num_parts = int((masses > LEAST_PART * masses.sum()).sum())
    found = {
        "less ink than a digit": coverage < COVERAGE[0],
        "more ink than a digit": coverage > COVERAGE[1],
        f"more than {MOST_PARTS} separate parts": num_parts > MOST_PARTS,
        f"a probability below {LEAST_PROBABILITY:.0%}": answer.probability < LEAST_PROBABILITY,
    }
    return [oddity for oddity, is_found in found.items() if is_found]


def remarks_on(
    images: NDArray[np.uint8], sources: list[str], answers: list[Answer], hint: str
) -> list[str]:
    """Returns one line for each kind of oddity, with the first names, and the hint where to look.

    Args:
        images: uint8 (N, 28, 28).
        sources: The name of each picture.
        answers: The answer for each picture.
        hint: A sentence that follows the remarks.
    """
    names: dict[str, list[str]] = {}
    for image, source, answer in zip(images, sources, answers, strict=True):
        for oddity in oddities(image, answer):
            names.setdefault(oddity, []).append(source)
    total = len(sources)
    lines = [
        f"Unlike MNIST's digits: {len(found):,} of {total:,} pictures, with {oddity}: "
        f"{listed(found)}."
        for oddity, found in names.items()
    ]
    return [*lines, hint]


def draw_inputs(
    images: NDArray[np.uint8], sources: list[str], answers: list[Answer]
) -> NDArray[np.uint8]:
    """Draws the first pictures as the classifier saw them, with name, answer and probability.

    An answer is followed by a question mark, and has another colour, if the picture or the answer
    is unlike those of MNIST's test images.

    Returns:
        A picture, uint8 (height, width, 3).
    """
    from PIL import Image, ImageDraw, ImageFont

    shown = min(len(images), MOST_DRAWN)
    gap = 14
    rows = math.ceil(shown / COLUMNS)
    top = gap + 2 * LINE
    columns = max(3, min(COLUMNS, shown))  # the title needs the width of three pictures
    size = (columns * (CELL + gap) + gap, top + rows * (CELL + 2 * LINE + gap))
    page = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(14)
    title = "What the classifier saw. ?: unlike MNIST's digits"
    draw.text((gap, gap), _shortened(title, font, size[0] - 2 * gap), INK, font)
    if left_out := len(images) - shown:
        draw.text(
            (gap, gap + LINE),
            f"The first {shown} of {len(images):,}; {left_out:,} are left out.",
            INK,
            font,
        )
    for number in range(shown):
        row, column = divmod(number, COLUMNS)
        x, y = gap + column * (CELL + gap), top + row * (CELL + 2 * LINE + gap)
        large = images[number].repeat(SCALE, axis=0).repeat(SCALE, axis=1)
        page.paste(Image.fromarray(large), (x, y))
        _write_below(
            draw, font, (x, y + CELL + 2), sources[number], answers[number], images[number]
        )
    return np.asarray(page)


def _write_below(
    draw: ImageDraw,
    font: Font,
    place: tuple[int, int],
    source: str,
    answer: Answer,
    image: NDArray[np.uint8],
) -> None:
    x, y = place
    is_odd = bool(oddities(image, answer))
    # Rounded down: only a probability of 1 is 100%.
    said = f"{answer.digit}, {math.floor(100 * answer.probability)}%{' ?' if is_odd else ''}"
    draw.text((x, y), _shortened(source, font, CELL), INK, font)
    draw.text((x, y + LINE), said, BAD if is_odd else INK, font)


def _shortened(text: str, font: Font, width: float) -> str:
    """Replaces the middle of a text by `...` if the text is wider than `width` pixels."""
    text = text if len(text) <= 200 else f"{text[:100]}{text[-100:]}"
    kept = len(text)
    short = text
    while font.getlength(short) > width and kept > 2:
        kept -= 1
        short = f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"
    return short


def write_inputs(
    path: Path, images: NDArray[np.uint8], sources: list[str], predictions: Path
) -> list[str]:
    """Writes `inputs.png`; returns remarks on pictures that are unlike MNIST's digits.

    Args:
        path: The file to write.
        images: uint8 (N, 28, 28), in the order of the predictions.
        sources: The name of each picture.
        predictions: The path of predictions.csv.
    """
    from megakit.reporting.files import write_atomically

    answers = read_answers(predictions)
    write_atomically(path, drawing.to_png(draw_inputs(images, sources, answers)))
    return remarks_on(images, sources, answers, f"To see what the classifier saw, open {path}.")
