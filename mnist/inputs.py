"""Draws what the classifier saw of a user's pictures: `inputs.png`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megakit.runtime.atomic_files import write_atomically
from megakit.training.predicted_classes import Predictions
from mnist import drawing
from mnist.figure_style import BAD, INK, percent, to_png

#: Largest number of pictures in `inputs.png`.
MOST_DRAWN = 60
#: Smallest probability of a sure answer; 95% of the test images have more.
LEAST_PROBABILITY = 0.7


def write_inputs(
    path: Path, predictions: Predictions, images: NDArray[np.uint8], sources: Sequence[str]
) -> str:
    """Draws the first pictures with name, answer and probability; `?` marks unsure answers.

    Args:
        path: The file to write.
        predictions: The answers.
        images: uint8 (N, 28, 28), as the classifier saw them.
        sources: The name of each picture.

    Returns:
        Text for the console: where to look, and how many answers are unsure.
    """
    shares = predictions.probabilities.max(axis=1)
    captions = []
    for source, answer, share in zip(sources, predictions.prediction, shares, strict=True):
        said = f"{answer}, {rated(share)}"
        captions.append([(source, INK), (said, BAD if "?" in said else INK)])
    shown = images[:MOST_DRAWN]
    title = f"What the classifier saw of {len(shown)} of {len(images):,} pictures"
    picture = drawing.captioned(shown, captions[:MOST_DRAWN], 6, 5, 14, title)
    write_atomically(path, to_png(picture))
    unsure = int((shares < LEAST_PROBABILITY).sum())
    hint = f"\nunsure answers (?): {unsure:,}; one digit on plain paper works best"
    return f"{path}{hint if unsure else ''}"


def rated(share: float) -> str:
    """Returns the probability of an answer in percent, with `?` if the answer is unsure."""
    return f"{percent(share)}{'' if share >= LEAST_PROBABILITY else ' ?'}"
