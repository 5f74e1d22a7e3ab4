"""Draws the pictures of labelled predictions: confusion matrix, mistakes and latent space."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megakit.runtime.atomic_files import write_atomically
from megakit.training.predicted_classes import Predictions
from mnist import drawing, figures
from mnist.figure_style import to_png

PICTURES = ("confusion_matrix.png", "mistakes.png", "latent_space.png")


def write_figures(
    folder: Path, predictions: Predictions, images: NDArray[np.uint8]
) -> dict[str, str]:
    """Draws what the predictions have labels for, and returns a line for the console.

    Args:
        folder: The run directory. Pictures of an earlier prediction are removed.
        predictions: The predictions; without labels, nothing is drawn.
        images: The images that were predicted, (N, 28, 28), by index.
    """
    drawn = _draw(predictions, images) if predictions.is_labelled else {}
    for name in {*PICTURES} - drawn.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in drawn.items():
        write_atomically(folder / name, content)
    return {"figures": f"{', '.join(drawn)}\nin {folder}"} if drawn else {}


def _draw(predictions: Predictions, images: NDArray[np.uint8]) -> dict[str, bytes]:
    """Returns PNG data by the name of the file."""
    drawn = {"confusion_matrix.png": to_png(figures.confusion_matrix(predictions.confusions()))}
    worst = predictions.mistakes()
    if len(worst):
        num_mistakes = (predictions.prediction != predictions.label).sum()
        drawn["mistakes.png"] = to_png(
            drawing.mistakes(
                images[worst.idx],
                worst,
                scale=6,
                title=f"{len(worst)} of {num_mistakes:,} mistakes, the most confident first",
            )
        )
    latent = predictions.latent
    if latent is not None and latent.shape[1] > 1:
        drawn["latent_space.png"] = to_png(figures.latent_space(latent, predictions.label))
    return drawn
