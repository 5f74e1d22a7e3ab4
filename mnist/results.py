"""Reports what a classifier predicted: columns, lines for the console, and figures."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megakit.errors import UserError
from megakit.runtime.atomic_files import write_atomically
from megakit.training.classifier import Predictions, Results
from megakit.training.predictions_csv import Columns, columns_of
from mnist import drawing, figures
from mnist.figure_style import percent, to_png

#: The largest number of pictures whose predictions the console shows.
MOST_ANSWERS = 20
#: Height and width in pixels of the largest image in mistakes.png.
LARGEST_IMAGE = 168
#: The files that show predictions.
FIGURES_AND_REPORT = ("confusion_matrix.png", "mistakes.png", "latent_space.png", "report.html")


def classify(results: Results, block: Any) -> Columns:
    """Adds a block's predictions to the results, and returns its columns of predictions.csv.

    Args:
        results: The results of the blocks so far.
        block: The outputs of the model, a `megakit.training.Outputs`.

    Raises:
        UserError: The outputs are not those of a classifier.
    """
    remedy = (
        "For a model that is no classifier, pass the columns of predictions.csv: "
        "run.finish(trainer, rows=...)."
    )
    if block.output.ndim != 2 or block.output.shape[1] < 2:
        shape = ", ".join(["B", *map(str, block.output.shape[1:])])
        raise UserError(
            f"predict_step returned 'output' of shape ({shape}), and a classifier returns logits "
            f"(B, classes) of at least two classes. {remedy}"
        )
    if block.label is None:
        raise UserError(
            "predict_step returned no 'label', and this script writes the scores of a classifier. "
            f"Return the labels, int64 (B,), -1 for an unknown label. {remedy}"
        )
    predictions = Predictions.from_logits(block.idx, block.label, block.output, block.latent)
    results.add(predictions)
    return columns_of(predictions)


def show(
    results: Results | None,
    folder: Path,
    dataset: Any,
    sources: Sequence[str] | None,
    report: Callable[[Path, Results], None] | None,
) -> dict[str, str]:
    """Writes figures and report.html if labels are known, and returns lines for the console.

    Args:
        results: The results of all blocks; None if the model is no classifier.
        folder: The run directory. Figures and report of an earlier prediction are removed.
        dataset: Returns a sample with its `data` by index.
        sources: The origin of each sample, or None.
        report: Writes report.html from its path and the results.
    """
    table: dict[str, str] = {}
    written: list[str] = []
    if results is not None and sources is not None:
        table = _answers(sources, results)
    if results is not None and results.is_labelled:
        written = _write_figures(folder, results, dataset)
        scores = results.scores()
        table |= {
            "accuracy": f"{scores['accuracy']:.2%}",
            "cross entropy": f"{scores['cross_entropy']:.4f}",
            "figures": f"{', '.join(written)}\nin {folder}",
        }
        if report is not None:
            report(folder / "report.html", results)
            table["report"] = str(folder / "report.html")
            written.append("report.html")
    for name in {*FIGURES_AND_REPORT} - {*written}:
        (folder / name).unlink(missing_ok=True)
    return table


def _answers(sources: Sequence[str], results: Results) -> dict[str, str]:
    """Returns a line for each of the first predictions, and the number of further predictions."""
    first = results.shown[np.arange(min(MOST_ANSWERS, len(results.shown)))]
    shown = zip(first.idx, first.prediction, first.probabilities.max(axis=1), strict=True)
    rows = {sources[idx]: f"{answer}, probability {percent(share)}" for idx, answer, share in shown}
    if (more := len(sources) - len(first)) > 0:
        rows["and"] = f"{more:,} more in predictions.csv"
    return rows


def _write_figures(folder: Path, results: Results, dataset: Any) -> list[str]:
    """Draws the figures of predictions for labelled samples; returns the names of the files."""
    drawn = {"confusion_matrix.png": to_png(figures.confusion_matrix(results.confusions))}
    worst = results.mistakes
    images = [np.squeeze(dataset[index]["data"]) for index in worst.idx.tolist()]
    if len({image.shape for image in images}) == 1 and images[0].ndim == 2:
        shown = drawing.shrunk(np.stack(images), LARGEST_IMAGE)
        drawn["mistakes.png"] = drawing.to_png(
            drawing.mistakes(
                drawing.dark_on_light(shown),
                worst.label,
                worst.prediction,
                worst.probabilities.max(axis=1),
                scale=max(1, LARGEST_IMAGE // max(shown.shape[1:])),
                title=f"{len(worst)} of {results.num_mistakes:,} mistakes, "
                "the most confident first",
            )
        )
    latent = results.shown.latent
    if latent is not None and latent.shape[1] > 1:
        drawn["latent_space.png"] = to_png(figures.latent_space(latent, results.shown.label))
    for name, content in drawn.items():
        write_atomically(folder / name, content)
    return list(drawn)
