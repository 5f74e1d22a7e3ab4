"""Shows what a classifier predicted: pictures, report.html, and lines for the console."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megakit.training.predicted_classes import Predictions
from mnist.inputs import rated, write_inputs
from mnist.prediction_figures import write_figures
from mnist.report import write_digit_report

#: The largest number of pictures whose predictions the console shows.
MOST_ANSWERS = 20


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
    report = folder / "report.html"
    report.unlink(missing_ok=True)
    if not (table := write_figures(folder, predictions, images)):
        sources = sources or []
        seen = write_inputs(folder / "inputs.png", predictions, images, sources)
        return _answers(predictions, sources) | {"pictures": seen}
    write_digit_report(report, predictions, images, checkpoint, dataset)
    return {**table, "report": str(report)}


def _answers(predictions: Predictions, sources: Sequence[str]) -> dict[str, str]:
    """Returns a line for each of the first pictures, and the number of further pictures."""
    first = sources[:MOST_ANSWERS]
    shares = predictions.probabilities.max(axis=1)
    rows = {
        source: f"{answer}, probability {rated(share)}"
        for source, answer, share in zip(first, predictions.prediction, shares, strict=False)
    }
    if (more := len(sources) - len(first)) > 0:
        rows["and"] = f"{more:,} more in predictions.csv"
    return rows
