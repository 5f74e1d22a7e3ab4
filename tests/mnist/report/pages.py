"""A trained classifier in the folder of its runs, and the pages that are written of such ones."""

import html
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.checkpoints.manifest import Manifest, list_files, write_manifest
from megakit.training.metrics_csv import Metrics, MetricsFile
from megakit.training.predicted_classes import Predictions
from mnist import files as mnist_files
from mnist.report import write_digit_report


def save(folder: Path, model: Any, stage: str, start: str | None) -> Path:
    """A checkpoint of a model in a run's folder, with a metrics.csv beside."""
    from tests.megakit.models.networks import save_checkpoint

    checkpoint = save_checkpoint(folder / "checkpoints" / "step=000010", model)
    name, files = type(model).__name__, list_files(checkpoint)
    manifest = Manifest(stage, name, "digits", 10, run={"start": start}, files=files)
    write_manifest(checkpoint, manifest)
    MetricsFile(folder / "metrics.csv").append(Metrics(10, 80, 0.5, 0.6, 1e-3))
    return checkpoint


@dataclass(frozen=True)
class Trained:
    """An autoencoder, a classifier that was trained for a moment, and what it predicts."""

    runs: Path
    pretrained: Path
    classifier: Path
    images: NDArray[np.uint8]
    predictions: Predictions
    model: Any
    autoencoder: Any


def predict(model: Any, images: NDArray[np.uint8], labels: Any) -> Predictions:
    """What a model predicts."""
    import torch

    from megakit.models import returns_latent

    x = torch.from_numpy(images).unsqueeze(1).float() / 255
    with torch.no_grad():
        found = model(x, return_latent=True) if returns_latent(model) else (model(x),)
    return Predictions.from_logits(np.arange(len(images)), labels, *map(np.array, found))


def page_of(model: Any, folder: Path) -> str:
    """The page of a classifier that is saved in a folder."""
    images, labels = mnist_files.read_digits("test")
    checkpoint = save(folder / "finetune", model, "finetune", None)
    predictions = predict(model, images, labels.astype(np.int64))
    write_digit_report(folder / "report.html", predictions, images, checkpoint, "<digits>")
    return (folder / "report.html").read_text("utf-8")


def headings(page: str) -> list[str]:
    return re.findall(r"<h2.*?>(.*?)</h2>", page)


def notes(page: str) -> list[str]:
    return [html.unescape(note) for note in re.findall(r'<p class="note">(.*?)</p>\n', page)]


def data_of(page: str) -> Any:
    """What the page's script is given."""
    return json.loads(page.partition('id="data">')[2].partition("</script>")[0])
