"""Selects the parts of a validation batch that TensorBoard shows, one function for each model.

The scripts import this module at their start, so torch and NeMo are imported inside the functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

#: A change of this module changes no result, so a run can go on.
REPORTS_ONLY = True

if TYPE_CHECKING:
    from torch import Tensor

    from megakit.training.views import View


def view_of_autoencoder(batch: Mapping[str, Any], output: Mapping[str, Any]) -> View:
    """Selects images, their reconstructions and their latent vectors."""
    from megakit.training.views import View

    images = batch["data"]
    x_hat = output["x_hat"].view_as(images)
    return View(images, batch["label"], reconstructions=x_hat, latent=output["z"])


def view_of_classifier(batch: Mapping[str, Any], logits: Tensor) -> View:
    """Selects images and the logits of their classes."""
    from megakit.training.views import View

    return View(batch["data"], batch["label"], logits=logits)
