"""A trained classifier, its report's page, and what the page's scripts do without a browser."""

import html
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.checkpoints.manifest import Manifest, list_files, write_manifest
from megakit.training.classifier import Predictions
from megakit.training.metrics_csv import Metrics, MetricsFile
from mnist import files as mnist_files
from mnist import report as digit_report


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
    model: Any
    autoencoder: Any


def predict(model: Any, images: NDArray[np.uint8], labels: Any = None) -> Predictions:
    """What a model of this module predicts."""
    import torch

    from megakit.models import returns_latent

    with torch.no_grad():
        x = torch.from_numpy(images).unsqueeze(1).float() / 255
        found = model(x, return_latent=True) if returns_latent(model) else (model(x),)
    labels = np.zeros(len(images), np.int64) if labels is None else labels.astype(np.int64)
    return Predictions.from_logits(np.arange(len(images)), labels, *map(np.array, found))


def page_of(model: Any, folder: Path, **changes: Any) -> tuple[str, Predictions]:
    """The page of a classifier that is saved in a folder, and what the classifier predicts."""
    images, labels = mnist_files.read_digits("test")
    predictions = replace(predict(model, images, labels), **changes)
    checkpoint = save(folder / "finetune", model, "finetune", None)
    path = folder / "report.html"
    digit_report.write_digit_report(path, predictions, images, checkpoint, "digits")
    return path.read_text("utf-8"), predictions


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def notes(page: str) -> list[str]:
    return [html.unescape(note) for note in re.findall(r"<p class=note>(.*?)</p>", page)]


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
