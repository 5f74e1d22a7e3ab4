"""Shows what a classifier predicted: pictures, report.html, and lines for the console."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megakit.runtime.atomic_files import write_atomically
from megakit.training.classifier import Predictions
from mnist import drawing, figures
from mnist.figure_style import percent, to_png
from mnist.inputs import write_inputs
from mnist.report import write_digit_report

#: The largest number of pictures whose predictions the console shows.
MOST_ANSWERS = 20
#: The files that show predictions.
PICTURES = ("confusion_matrix.png", "mistakes.png", "latent_space.png")
REPORT = "report.html"


def show_results(
    folder: Path,
    predictions: Predictions,
    *,
    images: NDArray[np.uint8],
    sources: Sequence[str] | None,
    checkpoint: Path,
    dataset: str,
) -> dict[str, str]:
    """Draws pictures and report.html if labels are known, and returns lines for the console.

    Args:
        folder: The run directory. Pictures and report of an earlier prediction are removed.
        predictions: The predictions.
        images: The images that were predicted, (N, 28, 28), by index.
        sources: The names of a user's own pictures, or None.
        checkpoint: The classifier.
        dataset: Name of the dataset that the classifier was trained on.
    """
    drawn = _draw(predictions, images) if predictions.is_labelled else {}
    for name in {*PICTURES, REPORT} - drawn.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in drawn.items():
        write_atomically(folder / name, content)
    if not drawn:
        sources = sources or []
        seen = write_inputs(folder / "inputs.png", predictions, images, sources)
        return _answers(predictions, sources) | {"pictures": seen}
    write_digit_report(folder / REPORT, predictions, images, checkpoint, dataset)
    return {"figures": f"{', '.join(drawn)}\nin {folder}", "report": str(folder / REPORT)}


def _answers(predictions: Predictions, sources: Sequence[str]) -> dict[str, str]:
    """Returns a line for each of the first pictures, and the number of further pictures."""
    first = sources[:MOST_ANSWERS]
    shares = predictions.probabilities.max(axis=1)
    rows = {
        source: f"{answer}, probability {percent(share)}"
        for source, answer, share in zip(first, predictions.prediction, shares, strict=False)
    }
    if (more := len(sources) - len(first)) > 0:
        rows["and"] = f"{more:,} more in predictions.csv"
    return rows


def _draw(predictions: Predictions, images: NDArray[np.uint8]) -> dict[str, bytes]:
    """Draws the pictures of labelled predictions; returns PNG data by the name of the file."""
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
