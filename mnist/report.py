"""Writes the tutorial's report.html: results of both trainings, and a canvas to draw a digit.

The page is one file, which needs no network and sends no data. It contains the pictures beside it,
the trained weights, and plotly's script, which draws the latent space.
"""

import base64
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megakit.checkpoints.manifest import read_manifest
from megakit.errors import UserError
from megakit.runtime.atomic_files import write_atomically
from megakit.training.metrics_csv import read_metrics
from megakit.training.predicted_classes import Predictions
from mnist import figures
from mnist.drawing import pairs
from mnist.figure_style import CLASS_COLORS, to_png

TEMPLATE = Path(__file__).with_suffix(".html")
#: The largest number of points in the latent space; a phone can rotate them.
MOST_POINTS = 3000


def write_digit_report(
    path: Path,
    predictions: Predictions,
    images: NDArray[np.uint8],
    checkpoint: Path,
    dataset: str,
) -> None:
    """Writes the page, with the pictures of the predictions that are in its folder.

    Args:
        path: Path of the page, `.html`.
        predictions: The predictions for the test set, with labels.
        images: Images of the test set, (N, 28, 28), indexed by the predictions' `idx`.
        checkpoint: The classifier's checkpoint in the output folder of its training. From this
            path, the page finds the curves and the checkpoint of pretraining.
        dataset: Name of the dataset that the classifier was trained on.
    """
    from plotly.offline import get_plotlyjs

    notes = []
    checkpoint, inputs = checkpoint.absolute(), images[predictions.idx]
    layers = chain_of_layers(checkpoint, inputs, predictions)
    if layers is None:
        notes.append("This page has no canvas: it runs models of linear and ReLU layers only.")
    digits = inputs[np.unique(predictions.label, return_index=True)[1]]  # the first of each
    checkpoints, restored = {"Fine-tuning": checkpoint}, []
    try:
        pretrained = find_pretraining(checkpoint)
        for some in np.array_split(digits, 2):
            restored.append(pairs(some, reconstruct(pretrained, some)))
        checkpoints = {"Pretraining": pretrained, **checkpoints}
    except UserError as error:
        notes.append(f"Left out: pretraining, because {error}")
    loader = jinja2.FileSystemLoader(TEMPLATE.parent)
    page = jinja2.Environment(loader=loader, autoescape=True).get_template(TEMPLATE.name)
    content = page.render(
        predictions=predictions,
        dataset=dataset,
        checkpoint="/".join(checkpoint.parts[-3::2]),
        notes=notes,
        samples=[_embedded(255 - image) for image in digits],
        curves={
            stage: _embedded(figures.curves(read_metrics(metrics), stage))
            for stage, path in checkpoints.items()
            if (metrics := path.parent.parent / "metrics.csv").exists()
        },
        reconstructions=[_embedded(picture) for picture in restored],
        pictures={file.stem: _embedded(file.read_bytes()) for file in path.parent.glob("*.png")},
        plotly=get_plotlyjs(),
        data={"colors": CLASS_COLORS, "layers": layers, "space": _space(predictions)},
    )
    write_atomically(path, content)


def chain_of_layers(
    checkpoint: Path, images: NDArray[np.uint8], predictions: Predictions
) -> list[Any] | None:
    """Returns a classifier's layers for the page, or None if it is no chain of linear and ReLU.

    Whether the layers are a chain is seen from what they compute: the probabilities and latents
    (the input of the last layer) of the predictions, which may be rounded to bfloat16.
    """
    from megakit.models import load_for_inference

    before = x = _as_input(images).flatten(1)
    layers: list[Any] = []
    with suppress(UserError, RuntimeError):  # layers of another package, or shapes that do not fit
        for layer in load_for_inference(checkpoint).modules():
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                before, x = x, nn.functional.linear(x, layer.weight, layer.bias)
                weights = base64.b64encode(layer.weight.numpy().astype("<f4").tobytes())
                layers.append({"weight": weights.decode(), "bias": layer.bias.tolist()})
            elif isinstance(layer, nn.ReLU):
                x = x.relu()
                layers.append("relu")
            elif not [*layer.children()]:
                return None
        latent = before if predictions.latent is None else predictions.latent
        if _nearly_equal(x.softmax(1), predictions.probabilities) and _nearly_equal(before, latent):
            return layers
    return None


def _nearly_equal(found: Tensor, expected: Any) -> bool:
    expected = np.asarray(expected)
    difference = np.abs(found.numpy() - expected).max()
    return bool(difference < 0.1 * np.abs(expected).max())


def find_pretraining(checkpoint: Path) -> Path:
    """Finds the checkpoint that a classifier's training started from, in its output folder.

    Raises:
        UserError: The checkpoint is not there; the classifier may have started without one.
    """
    start = read_manifest(checkpoint).run.get("start")
    runs = checkpoint.parent.parent.parent
    # All runs are searched, as `--fresh` renames old runs.
    for manifest in runs.glob("*/checkpoints/*/manifest.json"):
        with suppress(UserError):  # skip damaged checkpoints
            if read_manifest(manifest.parent).digest == start:
                return manifest.parent
    raise UserError(f"{runs} does not contain the classifier's start checkpoint.")


def reconstruct(checkpoint: Path, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns a pretrained autoencoder's reconstructions (N, 28, 28) of images.

    Raises:
        UserError: The autoencoder cannot be loaded.
    """
    from megakit.models import load_for_inference

    x_hat = load_for_inference(checkpoint)(_as_input(images))["x_hat"].clip(0, 1)
    restored: NDArray[np.uint8] = (x_hat * 255).round().byte().reshape(images.shape).numpy()
    return restored


def _as_input(images: NDArray[np.uint8]) -> Tensor:
    """Converts images (N, 28, 28) to the input of models, float32 (N, 1, 28, 28) in [0, 1]."""
    return torch.from_numpy(images[:, None].astype("float32") / 255)


def _embedded(picture: Any) -> str:
    """Returns the address of a picture, or of PNG data, as a part of the page."""
    content = picture if isinstance(picture, bytes) else to_png(picture)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _space(predictions: Predictions) -> dict[str, Any] | None:
    """Returns the points of each class, and the direction of the first view."""
    if predictions.latent is None:
        return None
    some = np.linspace(0, len(predictions) - 1, min(MOST_POINTS, len(predictions))).astype(int)
    labels = predictions.label[some]
    points, middles, direction = figures.clear_view(predictions.latent[some], labels)
    of_classes = {label: points[labels == label].round(3).tolist() for label in middles}
    return {"points": of_classes, "eye": direction.tolist()}
