"""Collects the outputs of steps with a callback."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor


class MetricTracker(pl.Callback):
    """Collects the outputs of steps, for analysis after training.

    Args:
        metrics_to_track_val: Keys of validation outputs. If an output is a tensor, it is collected
            under "unnamed".
        metrics_to_track_train: Keys of training outputs.

    Attributes:
        collection_val: A tensor of values for each key. `logged_metrics` is a list with one dict of
            all logged values for each validation.
        collection_train: The same for training; `logged_metrics` has one dict for each epoch.
    """

    def __init__(
        self, metrics_to_track_val: Sequence[str], metrics_to_track_train: Sequence[str]
    ) -> None:
        self.metrics_to_track_val = list(metrics_to_track_val)
        self.metrics_to_track_train = list(metrics_to_track_train)
        # Without a step, for example of a complete run, each key has an empty tensor.
        self._val = defaultdict[str, list[Any]](list, {key: [] for key in metrics_to_track_val})
        self._train = defaultdict[str, list[Any]](list, {key: [] for key in metrics_to_track_train})

    @staticmethod
    def _collect(into: dict[str, list[Any]], outputs: STEP_OUTPUT, keys: list[str]) -> None:
        if isinstance(outputs, Tensor):
            into["unnamed"].append(outputs)
        elif outputs is not None:
            for key in keys:
                into[key].append(outputs[key])

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, *args: Any
    ) -> None:
        """Collects the output of a validation step."""
        self._collect(self._val, outputs, self.metrics_to_track_val)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, *args: Any
    ) -> None:
        """Collects the output of a training step."""
        self._collect(self._train, outputs, self.metrics_to_track_train)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collects the values that were logged for this validation."""
        self._val["logged_metrics"].append(dict(trainer.logged_metrics))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collects the values that were logged for this epoch."""
        self._train["logged_metrics"].append(dict(trainer.logged_metrics))

    @property
    def collection_val(self) -> dict[str, Any]:
        """Returns the collected validation outputs by key."""
        return _as_tensors(self._val)

    @property
    def collection_train(self) -> dict[str, Any]:
        """Returns the collected training outputs by key."""
        return _as_tensors(self._train)


def _as_tensors(collected: dict[str, list[Any]]) -> dict[str, Any]:
    tensors = {k: torch.tensor(v) for k, v in collected.items() if k != "logged_metrics"}
    return {**tensors, "logged_metrics": list(collected.get("logged_metrics", []))}
