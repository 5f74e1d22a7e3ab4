"""Writes the tutorial's report.html: results of both trainings, and a canvas to draw a digit.

The page classifies drawings with the operations that `megakit.models.graph` traces from the
classifier. The page's script, in `mnist/report.html`, converts drawings like `training_form.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from megakit.checkpoints.manifest import list_checkpoints, read_manifest, verify
from megakit.errors import UserError
from megakit.training.classifier import Predictions
from megakit.training.metrics_csv import read_metrics
from mnist import report_parts as parts
from mnist.figure_style import CLASS_COLORS
from mnist.report_frame import ENVIRONMENT, Section, embed_graph, picture, write_report

if TYPE_CHECKING:
    from megakit.models.graph import Graph

T = TypeVar("T")

FOLDER = "checkpoints"
DRAWING = Path(__file__).with_suffix(".html")
#: Two classes are tied if their probabilities differ by less than this. Prediction in bfloat16
#: changes a probability by at most 0.02 on MNIST's 10,000 test images; 0.2 is ten times that.
TIE = 0.2


def write_digit_report(
    path: Path,
    predictions: Predictions,
    images: NDArray[np.uint8],
    checkpoint: Path,
    dataset: str,
) -> None:
    """Writes the page; if a part cannot be shown, a note on the page says why.

    Args:
        path: Path of the page, `.html`.
        predictions: Predictions for the test set.
        images: Images of the test set, (N, 28, 28), indexed by the predictions' `idx`.
        checkpoint: The classifier's checkpoint in the output folder of its training. From this
            path, the page finds the curves and the checkpoint of pretraining.
        dataset: Name of the dataset that the classifier was trained on.
    """
    notes: list[str] = []
    checkpoint, scores = checkpoint.absolute(), predictions.scores()
    shown = images[predictions.idx]
    title, latents = "Handwritten digits", None
    if predictions.latent is not None:
        title += f" in a latent space of {predictions.latent.shape[1]} dimensions"
        latents = _latents(predictions.latent, predictions.label)
    graph = _or_note(lambda: trace_classifier(checkpoint, shown, predictions), "the canvas", notes)
    drawing = latents if graph is None else _drawing(graph, shown, predictions, latents)
    pretrained = find_pretraining(checkpoint, notes)
    curves = _curves({"Pretraining": pretrained, "Fine-tuning": checkpoint}, notes)
    restored = pretrained and _or_note(
        lambda: _reconstructions(pretrained, shown, predictions.label),
        "the reconstructions",
        notes,
    )
    sections = [drawing, curves, restored, *_mistakes(images, predictions)]
    facts = {
        "accuracy": f"{scores['accuracy']:.2%}",
        "cross entropy": f"{scores['cross_entropy']:.4f}",
        f"test images ({dataset})": f"{len(predictions):,}",
        "checkpoint": "/".join(checkpoint.parts[-3::2]),
    }
    write_report(path, title, facts, [each for each in sections if each], notes)


def trace_classifier(
    checkpoint: Path, images: NDArray[np.uint8], predictions: Predictions
) -> Graph:
    """Traces a classifier, and compares the traced module's classes with the predictions.

    Args:
        checkpoint: The classifier.
        images: The images that were predicted, in the order of the predictions.
        predictions: The classifier's predictions.

    Returns:
        A graph with the output `logits` and, if the model returns latents, `latent`.

    Raises:
        UserError: The classifier cannot be loaded without Megatron, cannot be traced, or its
            traced module predicts other classes, except for ties.
    """
    from megakit.models import load_for_inference, returns_latent
    from megakit.models.graph import trace

    model = load_for_inference(checkpoint)
    options = {"return_latent": True} if returns_latent(model) else {}
    graph = trace(model, (1, 1, *images.shape[1:]), ("logits", "latent"), **options)
    classes = graph.run(_as_input(images))["logits"].argmax(dim=1).numpy()
    probabilities = predictions.probabilities
    of_classes = probabilities[np.arange(len(classes)), classes]
    differing = np.flatnonzero(probabilities.max(axis=1) - of_classes >= TIE)
    if len(differing):
        row = differing[0]
        raise UserError(
            f"the traced model and predictions.csv disagree on {len(differing):,} of "
            f"{len(classes):,} images. The first is idx {predictions.idx[row]}: "
            f"{classes[row]}, not {predictions.prediction[row]}."
        )
    return graph


def reconstruct(checkpoint: Path, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns a pretrained autoencoder's reconstructions (N, 28, 28) of images.

    Raises:
        UserError: The autoencoder cannot be loaded.
    """
    from megakit.models import load_for_inference

    x_hat = load_for_inference(checkpoint)(_as_input(images))["x_hat"].clip(0, 1)
    restored: NDArray[np.uint8] = (x_hat * 255).round().byte().reshape(images.shape).numpy()
    return restored


def _as_input(images: NDArray[np.uint8]) -> torch.Tensor:
    """Converts images (N, 28, 28) to the input of models, float32 (N, 1, 28, 28) in [0, 1]."""
    return torch.from_numpy(images[:, None].astype("float32") / 255)


def _or_note(make: Callable[[], T], part: str, notes: list[str]) -> T | None:
    """Calls a function and returns its result; if the function fails, adds a note, returns None."""
    try:
        return make()
    except Exception as error:  # the model is the user's own code and can raise any exception
        reason = error if isinstance(error, UserError) else f"of {type(error).__name__}: {error}"
        notes.append(f"Left out: {part}, because {reason}")
        return None


def find_pretraining(checkpoint: Path, notes: list[str]) -> Path | None:
    """Finds the checkpoint that a classifier's training started from, in its output folder.

    Args:
        checkpoint: The classifier.
        notes: If no checkpoint is found, a line with the reason is appended.
    """
    left_out = "Left out: pretraining's curves and reconstructions, because"
    digest = read_manifest(checkpoint).run.get("start")
    if digest is None:
        notes.append(f"{left_out} the classifier started from random weights.")
        return None
    runs = checkpoint.parents[2] if checkpoint.parent.name == FOLDER else checkpoint
    # All runs are searched, as `--fresh` renames old runs.
    for candidate in (path for run in runs.iterdir() for path in list_checkpoints(run / FOLDER)):
        with contextlib.suppress(UserError):  # skip damaged checkpoints
            if read_manifest(candidate).digest == digest:
                verify(candidate)
                return candidate
    notes.append(f"{left_out} {runs} no longer contains the classifier's start checkpoint.")
    return None


def _drawing(
    graph: Graph, images: NDArray[np.uint8], predictions: Predictions, latents: Section | None
) -> Section:
    rows = np.unique(predictions.label, return_index=True)[1]  # the first image of each digit
    found = zip(images[rows], predictions.label[rows], predictions.prediction[rows], strict=True)
    samples = [
        picture(image, f"Test image of the digit {label}, predicted as {prediction}")
        for image, label, prediction in found
    ]
    body = ENVIRONMENT.from_string(DRAWING.read_text("utf-8")).render(
        samples=samples,
        colors=CLASS_COLORS,
        latents=latents,
        model=embed_graph(graph.description, graph.weights, "model"),
    )
    text = "The trained weights classify your drawing in your browser."
    return Section("Draw a digit", text, body)


def _latents(points: NDArray[np.floating], labels: NDArray[np.int64]) -> Section:
    name = "Test images as points in the latent space, in the colours of their digits"
    text = (
        "The trunk maps each test image to a point. The head classifies by the position of the "
        "point. Each colour is one digit. Drag the chart, or use its buttons, to rotate the view."
    )
    chart = parts.points_in_space(points, labels, name, name="latents")
    return Section("Latent space", text, chart)


def _curves(checkpoints: dict[str, Path | None], notes: list[str]) -> Section | None:
    """Returns the section with the curves of the checkpoints' runs, from their metrics.csv."""
    found = []
    for title, checkpoint in checkpoints.items():
        path = checkpoint and checkpoint.parents[1] / "metrics.csv"
        if path and path.is_file():
            chart = parts.curves(read_metrics(path), f"Losses and learning rate of {title.lower()}")
            found.append((title, chart))
        elif path:
            notes.append(f"Left out: the curves of {title.lower()}, because {path} is missing.")
    text = (
        "The upper chart shows the losses on a logarithmic scale. Below are further values, such "
        "as the accuracy, and the learning rate."
    )
    return Section("Training", text, parts.side_by_side(found)) if found else None


def _reconstructions(
    pretrained: Path, images: NDArray[np.uint8], labels: NDArray[np.int64]
) -> Section:
    digits, rows = np.unique(labels, return_index=True)  # the first image of each digit
    originals, names = images[rows], [f"Digit {digit}" for digit in digits]
    restored = reconstruct(pretrained, originals)
    return Section(
        "Reconstructions",
        "Test images, and their reconstructions by the pretrained autoencoder.",
        parts.pairs(originals, restored, ("original", "reconstruction"), names),
    )


def _mistakes(images: NDArray[np.uint8], predictions: Predictions) -> list[Section]:
    matrix = Section(
        "Confusion matrix",
        "Each row shows how the images of one digit were predicted, with one column for each "
        "predicted digit. Blue cells are right. Stronger red cells are more frequent mistakes.",
        parts.confusion_matrix(predictions.confusions()),
    )
    worst = predictions.mistakes()
    pictures = Section(
        "Most confident mistakes",
        "The wrong predictions with the highest probabilities. Each caption shows the label, the "
        "prediction and its probability.",
        parts.mistakes(images[worst.idx], worst),
    )
    return [matrix, pictures] if len(worst) else [matrix]
