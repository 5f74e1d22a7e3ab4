"""Selects the parts of a validation batch that TensorBoard shows, for each of the two models."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megakit.training.views import View


def view_of_autoencoder(batch: Mapping[str, Any], output: Mapping[str, Any]) -> View:
    """Shows images, their reconstructions and their latent vectors."""
    images = batch["data"]
    x_hat = output["x_hat"].view_as(images)
    return View(images, batch["label"], reconstructions=x_hat, latent=output["z"])


def view_of_classifier(batch: Mapping[str, Any], logits: Tensor) -> View:
    """Shows images and their predicted classes."""
    return View(batch["data"], batch["label"], logits=logits)
