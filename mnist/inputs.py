"""Shows what the classifier saw of a user's pictures: `inputs.png`, and remarks on odd pictures."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megakit.runtime.atomic_files import write_atomically
from mnist import drawing
from mnist.figure_style import BAD, INK, percent, to_png
from mnist.own_pictures import listed
from mnist.photos import LEAST_PART, ink_of_parts

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
FONT_SIZE = 14


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


def draw_inputs(
    images: NDArray[np.uint8], sources: list[str], answers: list[Answer]
) -> NDArray[np.uint8]:
    """Draws the first pictures as the classifier saw them, with name, answer and probability.

    An answer is followed by a question mark, and has another colour, if the picture or the answer
    is unlike those of MNIST's test images.

    Returns:
        A picture, uint8 (height, width, 3).
    """
    shown = images[:MOST_DRAWN]
    title = "What the classifier saw. ?: unlike MNIST's digits"
    if left_out := len(images) - len(shown):
        title += f"\nThe first {len(shown)} of {len(images):,}; {left_out:,} are left out."
    captions = []
    for image, source, answer in zip(shown, sources, answers, strict=False):
        is_odd = bool(oddities(image, answer))
        said = f"{answer.digit}, {percent(answer.probability)}{' ?' if is_odd else ''}"
        captions.append([(source, INK), (said, BAD if is_odd else INK)])
    columns = min(COLUMNS, len(shown))
    return drawing.captioned(shown, captions, columns, SCALE, FONT_SIZE, title)


def write_inputs(
    path: Path, images: NDArray[np.uint8], sources: list[str], predictions: Path
) -> list[str]:
    """Writes `inputs.png`; returns one remark for each kind of oddity, and where to look.

    Args:
        path: The file to write.
        images: uint8 (N, 28, 28), in the order of the predictions.
        sources: The name of each picture.
        predictions: The path of predictions.csv.
    """
    answers = read_answers(predictions)
    write_atomically(path, to_png(draw_inputs(images, sources, answers)))
    names: dict[str, list[str]] = {}
    for image, source, answer in zip(images, sources, answers, strict=True):
        for oddity in oddities(image, answer):
            names.setdefault(oddity, []).append(source)
    lines = [
        f"Unlike MNIST's digits: {len(found):,} of {len(sources):,} pictures, with {oddity}: "
        f"{listed(found)}."
        for oddity, found in names.items()
    ]
    return [*lines, f"To see what the classifier saw, open {path}."]
