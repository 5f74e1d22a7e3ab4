"""Shows parts of each validation in TensorBoard: reconstructions, mistakes, the latent space."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from numpy.typing import NDArray
from torch import Tensor

from megakit.training.predictions_csv import Predictions, most_confident_mistakes
from megakit.training.tensorboard import RunLogger
from megakit.training.validation import (
    gather_from_ranks,
    has_outputs,
    on_host,
    real_samples,
)
from mnist import drawing

#: Columns of samples by name, as in `View`.
Seen = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class View:
    """Holds what can be drawn of B samples; an output that the model does not have is None.

    Attributes:
        images: Images with values in [0, 1], (B, channels, height, width); draws channel 0.
        label: The classes, int64 (B,).
        reconstructions: An autoencoder's reconstructions, with the range and shape of `images`.
        latent: The latent point of each sample, (B, dimensions).
        logits: The logits of each class, (B, classes).
    """

    images: Tensor
    label: Tensor
    reconstructions: Tensor | None = None
    latent: Tensor | None = None
    logits: Tensor | None = None


class LogPictures(pl.Callback):
    """Draws some reconstructions at each validation, and all pictures after the last validation.

    The last pipeline stage, where the model's output is, collects samples from the micro batches of
    the validation. It holds them on its device, and copies `NUM_POINTS` of them to the host at a
    time, because each copy waits for a GPU. Rank 0 gets the samples that can be in a picture, and
    logs the pictures with the `RunLogger` of the trainer.

    Args:
        make_view: Converts a validation batch and the model's output to a `View`.
    """

    NUM_RECONSTRUCTIONS = 10
    NUM_POINTS = 1000
    NUM_MISTAKES = 25

    def __init__(self, make_view: Callable[[Any, Any], View]) -> None:
        self.make_view = make_view
        self._held: list[dict[str, Tensor]] = []
        self._seen: list[Seen] = []
        self._num_missing = 0

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sets the number of samples to collect, and starts collecting on ranks with outputs."""
        self._held, self._seen = [], []  # of a validation that was interrupted
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # not declared
        stops = [each for each in callbacks if isinstance(each, EarlyStopping)]
        may_stop = any(stop.wait_count + 1 >= stop.patience for stop in stops)
        may_be_last = may_stop or trainer.global_step == trainer.max_steps
        self._num_missing = sys.maxsize if may_be_last else self.NUM_RECONSTRUCTIONS
        if has_outputs() and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._observers(trainer).append(self.collect)

    def _observers(self, trainer: Any) -> list[Callable[[Any, Any], None]]:
        """Returns the functions that `ExactStrategy` calls with each validated micro batch."""
        observers: list[Callable[[Any, Any], None]] = trainer.strategy.observers
        return observers

    def collect(self, batch: Any, output: Any) -> None:
        """Collects the samples of a micro batch, unless there are enough samples."""
        if self._num_missing <= 0:
            return
        view = self.make_view(batch, output)
        if view.images.ndim != 4:  # a sample without height and width is no picture
            return
        all_real = view.images.new_ones(len(view.images), dtype=torch.bool)
        real = real_samples(batch) if "loss_mask" in batch else all_real
        tensors = {name: value for name, value in vars(view).items() if value is not None}
        self._held.append({"real": real, **{name: _small(name, v) for name, v in tensors.items()}})
        self._num_missing -= len(view.label)
        if sum(len(samples["real"]) for samples in self._held) >= self.NUM_POINTS:
            self._take_held()

    def _take_held(self) -> None:
        """Copies the held samples to the host, and keeps those that can be in a picture."""
        held, self._held = self._held, []
        new = on_host({name: torch.cat([samples[name] for samples in held]) for name in held[0]})
        real = new.pop("real")
        seen = _joined([*self._seen, {name: new[name][real].numpy() for name in new}])
        rows = np.arange(len(seen["label"]))
        some = rows[: self.NUM_POINTS if self._num_missing > 0 else self.NUM_RECONSTRUCTIONS]
        if "logits" in seen:
            found = Predictions.from_logits(rows, seen["label"], seen["logits"])
            some = np.union1d(some, most_confident_mistakes(found, self.NUM_MISTAKES))
        self._seen = [{name: column[some] for name, column in seen.items()}]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops collecting, sends the samples to rank 0, and draws the pictures there."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if has_outputs():
            self._observers(trainer).remove(self.collect)
        if self._held:
            self._take_held()
        own, self._seen = self._seen, []
        parts = [part for of_rank in gather_from_ranks(own, trainer) for part in of_rank]
        loggers = [logger for logger in trainer.loggers if isinstance(logger, RunLogger)]
        if not (parts and loggers and trainer.is_global_zero):
            return
        is_last = trainer.global_step == trainer.max_steps or trainer.should_stop
        self._draw(loggers[0], _joined(parts), trainer.global_step, is_last)

    def _draw(
        self, logger: RunLogger, seen: Mapping[str, NDArray[Any]], step: int, is_last: bool
    ) -> None:
        images, label = seen["images"], seen["label"]
        if "reconstructions" in seen:
            some = slice(self.NUM_RECONSTRUCTIONS)
            rows = [images[some], seen["reconstructions"][some]]
            add_image(logger, "reconstructions", drawing.rows_of_images(rows), step)
        if is_last and "latent" in seen:
            some = slice(self.NUM_POINTS)
            add_latent_space(logger, seen["latent"][some], label[some], images[some], step)
        if is_last and "logits" in seen:
            found = Predictions.from_logits(np.arange(len(label)), label, seen["logits"])
            worst = found[most_confident_mistakes(found, self.NUM_MISTAKES)]
            if len(worst):
                shares = worst.probabilities.max(axis=1)
                of = (images[worst.idx], worst.label, worst.prediction, shares)
                add_image(logger, "mistakes", drawing.mistakes(*of), step)


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
    """Returns a copy of what is drawn: of images the first channel, (N, height, width), in bytes.

    A loss may change the output in place.
    """
    if name in ("images", "reconstructions"):
        return values[:, 0].detach().float().clamp(0, 1).mul(255).round().byte()
    values = values.detach().clone()
    return values.float() if values.is_floating_point() else values


def _joined(parts: list[Seen]) -> Seen:
    """Concatenates the columns of samples, in the order of the parts."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def view_of_autoencoder(batch: Mapping[str, Any], output: Mapping[str, Any]) -> View:
    """Selects images, their reconstructions and their latent vectors."""
    images = batch["data"]
    x_hat = output["x_hat"].view_as(images)
    return View(images, batch["label"], reconstructions=x_hat, latent=output["z"])


def view_of_classifier(batch: Mapping[str, Any], logits: Tensor) -> View:
    """Selects images and the logits of their classes; of a regression only the images."""
    images, label = batch["data"], batch["label"]
    return View(images, label, logits=None if label.is_floating_point() else logits)
