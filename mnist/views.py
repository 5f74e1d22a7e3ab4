"""Shows parts of each validation in TensorBoard: reconstructions, mistakes, the latent space."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakit.nemo.tensorboard import RunLogger
from megakit.training.gathering import gather_from_ranks, has_outputs, real_samples
from megakit.training.predicted_classes import Predictions
from mnist import drawing

#: What can be drawn of B samples: `images` with values in [0, 1], (B, channels, height, width), of
#: which channel 0 is drawn, and `label`, int64 (B,); if the model has them, `reconstructions` like
#: `images`, `latent` (B, dimensions) and `logits` (B, classes).
View = dict[str, Tensor]


class LogPictures(pl.Callback):
    """Draws some reconstructions at each validation, and all pictures after the last validation.

    The last pipeline stage, where the model's output is, collects the first samples of the
    validation. Rank 0 draws them, and logs the pictures with the `RunLogger` of the trainer.

    Args:
        make_view: Converts a validation batch and the model's output to a `View`.
    """

    NUM_RECONSTRUCTIONS = 10
    NUM_POINTS = 1000

    def __init__(self, make_view: Callable[[Any, Any], View]) -> None:
        self.make_view = make_view
        self._views: list[View] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts collecting on ranks with outputs."""
        if has_outputs():
            _observers(trainer).append(self.collect)

    def collect(self, batch: Any, output: Any) -> None:
        """Collects the samples of a micro batch, unless there are enough samples."""
        view = self.make_view(batch, output)
        is_image = view["images"].ndim == 4  # a sample without height and width is no picture
        if is_image and len(self._views) * len(view["label"]) < self.NUM_POINTS:
            # Copies stay on the device, because a loss may change the output in place, and because
            # a copy to the host would wait for a GPU.
            copies = {name: _small(name, values) for name, values in view.items()}
            self._views.append({**copies, "is_real": real_samples(batch)})

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops collecting, sends the samples to rank 0, and draws the pictures there."""
        if has_outputs():
            _observers(trainer).remove(self.collect)
        own, self._views = _joined(self._views), []
        if trainer.sanity_checking:
            return
        seen = _joined([part for part in gather_from_ranks(own) if part])
        is_last = trainer.global_step == trainer.max_steps or trainer.should_stop
        for logger in trainer.loggers:
            if seen and isinstance(logger, RunLogger):
                self.draw(logger, seen, trainer.global_step, is_last)

    def draw(self, logger: RunLogger, seen: View, step: int, is_last: bool) -> None:
        """Draws what the samples of all ranks have."""
        shown = torch.nonzero(seen["is_real"])[: self.NUM_POINTS, 0]
        arrays = {name: values[shown].numpy() for name, values in seen.items()}
        images, label = arrays["images"], arrays["label"]
        if "reconstructions" in seen:
            first = slice(self.NUM_RECONSTRUCTIONS)
            picture = drawing.pairs(images[first], arrays["reconstructions"][first])
            add_image(logger, "reconstructions", picture, step)
        if is_last and "latent" in seen:
            add_latent_space(logger, arrays["latent"], label, images, step)
        if is_last and "logits" in seen:
            found = Predictions.from_logits(np.arange(len(label)), label, arrays["logits"])
            if len(worst := found.mistakes()):
                picture = drawing.mistakes(images[worst.idx], worst)
                add_image(logger, "mistakes", picture, step)


def _observers(trainer: Any) -> list[Callable[[Any, Any], None]]:
    """Returns the functions that `ExactStrategy` calls with each validated micro batch."""
    observers: list[Callable[[Any, Any], None]] = trainer.strategy.observers
    return observers


def add_image(logger: RunLogger, name: str, image: NDArray[np.uint8], step: int) -> None:
    """Adds a picture (height, width, 3) to a series, from which users select by step."""
    # A separate section; otherwise TensorBoard shows pictures among the curves.
    tag = f"{logger.section}_pictures/{name}"
    logger.experiment.add_image(tag, image, step, dataformats="HWC")


def add_latent_space(
    logger: RunLogger,
    latent: NDArray[np.float32],
    label: NDArray[np.int64],
    images: NDArray[np.uint8],
    step: int,
) -> None:
    """Adds latent points (N, dimensions) for TensorBoard's projector; 1,000 points take 0.1 s.

    Each point is shown as its image (N, height, width).
    """
    pictures = torch.from_numpy(images).unsqueeze(1).float() / 255
    points = (torch.from_numpy(latent), label.astype(str).tolist(), pictures)
    logger.experiment.add_embedding(*points, step, tag=f"{logger.section} latent space")


def _small(name: str, values: Tensor) -> Tensor:
    """Returns a copy of what is drawn: channel 0 of images, (N, height, width), in bytes."""
    if name in ("images", "reconstructions"):
        return values[:, 0].detach().float().clamp(0, 1).mul(255).round().byte()
    values = values.detach().clone()
    return values.float() if values.is_floating_point() else values


def _joined(views: Sequence[View]) -> View:
    """Concatenates samples in the order of the parts, on the host."""
    return {
        name: torch.cat([view[name] for view in views]).cpu() for view in views[:1] for name in view
    }


def view_of_autoencoder(batch: Mapping[str, Any], output: Mapping[str, Any]) -> View:
    """Selects images, their reconstructions and their latent vectors."""
    images = batch["data"]
    view = {"images": images, "label": batch["label"], "latent": output["z"]}
    return {**view, "reconstructions": output["x_hat"].view_as(images)}


def view_of_classifier(batch: Mapping[str, Any], logits: Tensor) -> View:
    """Selects images and the logits of their classes; of a regression only the images."""
    view = {"images": batch["data"], "label": batch["label"]}
    return view if view["label"].is_floating_point() else {**view, "logits": logits}
