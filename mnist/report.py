"""report.html of the tutorial: what both trainings learned, and paper to draw a digit on.

The page computes with the trained weights what `ExampleFineTuneModel` does, and brings a drawing to
the form of the training images as `own_pictures.py` does; its script is in `report.html`.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from megakit.checkpoints.folders import list_checkpoints, weights_folder
from megakit.checkpoints.manifest import read_manifest, verify
from megakit.errors import UserError
from megakit.reporting.metrics import read_metrics

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megakit.reporting.predictions import Predictions
    from megakit.reporting.report import Section

    Weights = dict[str, NDArray[np.float32]]

FOLDER = "checkpoints"
DRAWING = Path(__file__).with_suffix(".html")
MODEL = tuple(
    f"{n}.{p}" for n in ("linear1", "linear2", "digit_classifier") for p in ("weight", "bias")
)


def write_digit_report(
    path: Path,
    predictions: Predictions,
    images: NDArray[np.uint8],
    checkpoint: Path,
    dataset: str,
) -> None:
    """Writes the page; what cannot be shown is left out, and the page says so.

    Args:
        path: Of the page, `.html`.
        predictions: Of the test set.
        images: Of the test set, by the predictions' `idx`, (N, 28, 28).
        checkpoint: The classifier that predicted, where its training left it: its curves and its
            pretraining are found from there.
        dataset: What it was trained on.

    Raises:
        UserError: The checkpoint cannot be read.
    """
    from megakit.reporting.report import write_report

    notes: list[str] = []
    checkpoint = checkpoint.absolute()
    images, labels = images[predictions.idx], predictions.label
    weights = read_weights(checkpoint)
    pretrained = find_pretraining(checkpoint, notes)
    sections = [_drawing(weights, images, labels)]
    sections += _curves({"Pretraining": pretrained, "Fine-tuning": checkpoint}, notes)
    if pretrained is not None:
        sections.append(_reconstructions(read_weights(pretrained), images, labels))
    sections += _mistakes(images, predictions)
    scores = predictions.scores()
    facts = {
        "accuracy": f"{scores['accuracy']:.2%}",
        "cross entropy": f"{scores['cross_entropy']:.4f}",
        f"test images ({dataset})": f"{scores['num_samples']:,}",
        "checkpoint": "/".join(checkpoint.parts[-3::2]),
    }
    title = f"Handwritten digits in {len(weights['linear2.bias'])} numbers"
    write_report(path, title, facts, sections, notes)


def read_weights(checkpoint: Path) -> Weights:
    """A checkpoint's weights by name, whole, whatever layout they were saved under.

    Raises:
        UserError: The checkpoint is damaged or not to be trusted.
    """
    from megakit.models.loading import PREFIX, read_tensors
    from megakit.runtime.safe_reading import read_safely

    verify(checkpoint)
    read_safely()
    whole = read_tensors(str(weights_folder(checkpoint)))
    return {name.removeprefix(PREFIX): tensor.float().numpy() for name, tensor in whole.items()}


def find_pretraining(checkpoint: Path, notes: list[str]) -> Path | None:
    """The checkpoint that a classifier's training started from, if it is among the runs beside it.

    Args:
        checkpoint: The classifier.
        notes: Gets a line about why there is none.
    """
    left_out = "Left out: pretraining's curves and reconstructions, for the classifier"
    digest = read_manifest(checkpoint).run.get("start")
    if digest is None:
        notes.append(f"{left_out} started from fresh weights.")
        return None
    runs = checkpoint.parents[2] if checkpoint.parent.name == FOLDER else checkpoint
    # Runs that were set aside have other names.
    for candidate in (path for run in runs.iterdir() for path in list_checkpoints(run / FOLDER)):
        with contextlib.suppress(UserError):  # a damaged one is not this page's business
            if read_manifest(candidate).digest == digest:
                verify(candidate)
                return candidate
    notes.append(f"{left_out}'s start is not in {runs} any more.")
    return None


def encode(weights: Weights, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The latents z (N, 3) of images (N, 28, 28)."""
    x = images.reshape(len(images), -1).astype("float32") / 255
    return _linear(weights, "linear2", _linear(weights, "linear1", x).clip(min=0))


def decode(weights: Weights, z: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The images (N, 28, 28) that the autoencoder makes of latents (N, 3)."""
    x = _linear(weights, "linear4", _linear(weights, "linear3", z).clip(min=0))
    return (x.clip(0, 1) * 255).round().astype("uint8").reshape(-1, 28, 28)


def classify(weights: Weights, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The logits (N, 10) of images (N, 28, 28)."""
    return _linear(weights, "digit_classifier", encode(weights, images))


def _linear(weights: Weights, name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    y: NDArray[np.float32] = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
    return y


def _drawing(weights: Weights, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Section:
    from megakit.reporting import report_parts as parts
    from megakit.reporting.figure_style import class_color
    from megakit.reporting.report import Section, embed_arrays, embed_json, picture

    latents = parts.points_in_space(
        encode(weights, images),
        labels,
        "Test images as points in three dimensions, in the colours of their digits",
        name="latents",
    )
    samples = [
        f"<button type=button>{picture(images[row], f'Test image of a {labels[row]}')}</button>"
        for row in _one_of_each(labels)
    ]
    pieces = {
        "samples": "".join(samples),
        "latents": latents,
        "model": embed_json(embed_arrays({name: weights[name] for name in MODEL}), "model"),
        "colors": embed_json([class_color(digit) for digit in range(10)], "colors"),
    }
    body = re.sub(r"\{\{(\w+)\}\}", lambda place: pieces[place[1]], DRAWING.read_text("utf-8"))
    return Section(
        "Draw a digit",
        "The classifier squeezes each image into so few numbers that they are a point in space, "
        "and decides by where that lies. The points are test images in the colours of their "
        "digits; drag to turn them. Your drawing is classified here, on this page, by the trained "
        "weights.",
        body,
    )


def _curves(checkpoints: dict[str, Path | None], notes: list[str]) -> list[Section]:
    """The curves of the runs that checkpoints belong to, as far as they lie beside them."""
    from megakit.reporting import report_parts as parts
    from megakit.reporting.report import Section

    found = []
    for title, checkpoint in checkpoints.items():
        path = checkpoint and checkpoint.parents[1] / "metrics.csv"
        if path and path.is_file():
            chart = parts.curves(read_metrics(path), f"Losses and learning rate of {title.lower()}")
            found.append((title, chart))
        elif path:
            notes.append(f"Left out: the curves of {title.lower()}, for there is no {path}.")
    text = (
        "The losses on a logarithmic scale; below them other measured values, such as the "
        "accuracy, and the learning rate of each step."
    )
    return [Section("Training", text, parts.side_by_side(found))] if found else []


def _reconstructions(
    weights: Weights, images: NDArray[np.uint8], labels: NDArray[np.int64]
) -> Section:
    from megakit.reporting import report_parts as parts
    from megakit.reporting.report import Section

    originals = images[_one_of_each(labels)]
    restored = decode(weights, encode(weights, originals))
    return Section(
        "Reconstructions",
        "Test images, and what the pretrained autoencoder restores from so few numbers.",
        parts.pairs(originals, restored, ("original", "restored")),
    )


def _mistakes(images: NDArray[np.uint8], predictions: Predictions) -> list[Section]:
    from megakit.reporting import report_parts as parts
    from megakit.reporting.figures import surest_mistakes
    from megakit.reporting.report import Section

    labels, probabilities = predictions.label, predictions.probabilities
    matrix = Section(
        "Confusion matrix",
        "Each row holds the images of one digit; each column those that were taken for one. "
        "Blue is right. The darker the red, the more of a digit's images went astray.",
        parts.confusion_matrix(labels, predictions.prediction, probabilities.shape[1]),
    )
    surest = surest_mistakes(labels, probabilities)
    if not len(surest):
        return [matrix]
    pictures = Section(
        "Surest mistakes",
        "What each image shows, what the classifier took it for, and how sure it was.",
        parts.mistakes(images[surest], labels[surest], probabilities[surest]),
    )
    return [matrix, pictures]


def _one_of_each(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the first image of each digit is."""
    import numpy as np

    first: NDArray[np.int64] = np.unique(labels, return_index=True)[1]
    return first
