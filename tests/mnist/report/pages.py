"""A trained classifier, its report's page, and what the page's scripts do without a browser."""

import html
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.checkpoints.manifest import Manifest, list_files, write_manifest
from megakit.reporting.metrics import Metrics, MetricsFile
from megakit.reporting.predictions import Predictions
from megakit.reporting.results import Results
from mnist import files as mnist_files
from mnist import report as digit_report
from mnist.own_pictures import to_training_form


def save(folder: Path, model: Any, stage: str, start: str | None) -> Path:
    """A checkpoint of a model in a run's folder, with a metrics.csv beside."""
    from tests.megakit.models.networks import save_checkpoint

    checkpoint = save_checkpoint(folder / "checkpoints" / "step=000010", model)
    name = type(model).__name__
    files = list_files(checkpoint)
    write_manifest(
        checkpoint, Manifest(stage, name, "digits", 10, run={"start": start}, files=files)
    )
    MetricsFile(folder / "metrics.csv").append(
        Metrics(10, 80, {"pretrain": 0.25, "finetune": 0.5}[stage], 0.6, 1e-3)
    )
    return checkpoint


@dataclass(frozen=True)
class Trained:
    runs: Path
    pretrained: Path
    classifier: Path
    images: NDArray[np.uint8]
    predictions: Predictions
    restored: NDArray[np.float32]
    model: Any

    def classify(self, images: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Probabilities (N, 10) and latents (N, 3), computed by the trained model in torch."""
        predictions = predict(self.model, images)
        assert predictions.latent is not None
        return predictions.probabilities, predictions.latent


def predict(model: Any, images: NDArray[np.uint8], labels: Any = None) -> Predictions:
    """What a model of this module predicts."""
    import torch

    from megakit.models import returns_latent

    with torch.no_grad():
        x = torch.from_numpy(images).unsqueeze(1).float() / 255
        found = model(x, return_latent=True) if returns_latent(model) else (model(x),)
    labels = np.zeros(len(images), np.int64) if labels is None else labels.astype(np.int64)
    return Predictions.from_logits(np.arange(len(images)), labels, *map(np.array, found))


def results_of(predictions: Predictions) -> Results:
    """The results of all predictions in one block."""
    results = Results(len(predictions))
    results.add(predictions)
    return results


def page_of(model: Any, folder: Path, **changes: Any) -> tuple[str, Predictions]:
    """The page of a classifier that is saved in a folder, and what the classifier predicts."""
    images, labels = mnist_files.read_digits("test")
    predictions = replace(predict(model, images, labels), **changes)
    checkpoint = save(folder / "finetune", model, "finetune", None)
    path = folder / "report.html"
    results = results_of(predictions)
    digit_report.write_digit_report(path, results, images, checkpoint, "digits")
    return path.read_text("utf-8"), predictions


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def notes(page: str) -> list[str]:
    return [html.unescape(note) for note in re.findall(r"<p class=note>(.*?)</p>", page)]


def assert_same(models: Any, predictions: Predictions, count: int) -> None:
    """What the page's `classify` returned is what the model computes in torch."""
    assert len(models) == count
    probabilities = [model["probabilities"] for model in models]
    assert np.allclose(probabilities, predictions.probabilities[:count], atol=1e-4)
    if predictions.latent is None:
        assert not any("latent" in model for model in models)
    else:
        latents = [model["latent"] for model in models]
        assert np.allclose(latents, predictions.latent[:count], atol=1e-4)


#: Enough of a browser for the page's scripts to load: every element can do anything, to no effect.
SHIM = """
const anything = new Proxy(function () {}, { get: () => anything, apply: () => anything });
const document = {
  getElementById: (name) => (name === "model" ? { textContent: given.model } : anything),
  addEventListener() {},
};
"""


def scripts_of(page: str) -> tuple[str, str]:
    """The text of a page's model, and the scripts that run it and that convert drawings."""
    _, _, rest = page.partition('<script type="application/json" id="model">')
    model, _, rest = rest.partition("</script>")
    scripts = re.findall(r"<script>\n(.*?)</script>", rest, re.DOTALL)[:2]
    assert "function readGraph" in scripts[0]
    assert "function classify" in scripts[1]
    return model, "".join(scripts)


def strange_pictures() -> list[NDArray[np.uint8]]:
    """Of many sizes, dark on bright and bright on dark, with noise, and with next to nothing."""
    random = np.random.default_rng(0)
    pictures: list[NDArray[Any]] = []
    for height, width in [(28, 28), (5, 90), (90, 5), (61, 33), (33, 61), (20, 20), (1, 1), (3, 2)]:
        noise = random.integers(0, 256, (height, width)).astype(np.uint8)
        line = np.full((height, width), 250, np.uint8)
        line[height // 3 : height // 2 + 1, width // 4 : width // 2 + 1] = 40
        empty = np.full((height, width), 9, np.uint8)
        pictures += [noise, line, 255 - line, empty]
    blob = random.integers(0, 256, (40, 40)).astype(np.uint8)
    blob[:9] = blob[-4:] = blob[:, :2] = blob[:, -13:] = 20
    halves = np.full((20, 20), 10, np.uint8)  # whose border has as many bright pixels as dark
    halves[:, 10:] = 240
    halves[4:8, 13:15] = 10
    greys = [np.full((30, 30), paper, np.uint8) for paper in (127, 128, 100, 100)]
    for grey, ink in zip(greys, (240, 20, 131, 132), strict=True):
        grey[8:20, 10:14] = ink
    faint = np.pad(halves[:, :10], 3)
    faint[0, 0], faint[-1, -1] = 255, 31  # an eighth of the brightest is 31.875
    pictures += [blob, 255 - blob, halves, *greys, faint]
    return pictures


def formed(picture: NDArray[np.uint8]) -> list[int] | None:
    try:
        return to_training_form(picture).ravel().tolist()
    except ValueError:
        return None


def given_pictures() -> list[dict[str, Any]]:
    return [
        {"pixels": p.ravel().tolist(), "height": p.shape[0], "width": p.shape[1]}
        for p in strange_pictures()
    ]
