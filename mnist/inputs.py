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
        A line for the console: where to look, and how many answers are unsure.
    """
    shares = predictions.probabilities.max(axis=1)
    captions = []
    for source, answer, share in zip(sources, predictions.prediction, shares, strict=True):
        is_sure = share >= LEAST_PROBABILITY
        said = f"{answer}, {percent(share)}{'' if is_sure else ' ?'}"
        captions.append([(source, INK), (said, INK if is_sure else BAD)])
    shown = images[:MOST_DRAWN]
    title = f"What the classifier saw of {len(shown)} of {len(images):,} pictures"
    picture = drawing.captioned(shown, captions[:MOST_DRAWN], 6, 5, 14, title)
    write_atomically(path, to_png(picture))
    unsure = int((shares < LEAST_PROBABILITY).sum())
    return f"{path}\n{unsure:,} answers are unsure; one digit on plain paper works best"
