"""Collects the outputs of steps with a callback."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

Collected = dict[str, list[Any]]


class MetricTracker(pl.Callback):
    """Collects the outputs of steps, for analysis after training.

    `collection_val` and `collection_train` have a tensor of values for each key. `logged_metrics`
    in them is a list with one dict of all logged values for each validation or epoch.

    Args:
        metrics_to_track_val: Keys of validation outputs. If an output is a tensor, it is collected
            under "unnamed".
        metrics_to_track_train: Keys of training outputs.
    """

    def __init__(
        self, metrics_to_track_val: Sequence[str], metrics_to_track_train: Sequence[str]
    ) -> None:
        self.metrics_to_track_val = list(metrics_to_track_val)
        self.metrics_to_track_train = list(metrics_to_track_train)
        # Without a step, for example of a complete run, each key has an empty tensor.
        self._val: Collected = {key: [] for key in (*metrics_to_track_val, "logged_metrics")}
        self._train: Collected = {key: [] for key in (*metrics_to_track_train, "logged_metrics")}

    collection_val = property(lambda self: _as_tensors(self._val))
    collection_train = property(lambda self: _as_tensors(self._train))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        """Collects the output of a validation step."""
        _collect(self._val, self.metrics_to_track_val, outputs)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        """Collects the output of a training step."""
        _collect(self._train, self.metrics_to_track_train, outputs)

    def on_validation_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Collects the values that were logged for this validation."""
        self._val["logged_metrics"].append(dict(trainer.logged_metrics))

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Collects the values that were logged for this epoch."""
        self._train["logged_metrics"].append(dict(trainer.logged_metrics))


def _collect(into: Collected, keys: list[str], outputs: Any) -> None:
    if isinstance(outputs, Tensor):
        into.setdefault("unnamed", []).append(outputs)
    elif outputs is not None:
        for key in keys:
            into[key].append(outputs[key])


def _as_tensors(collected: Collected) -> dict[str, Any]:
    return {k: list(v) if k == "logged_metrics" else torch.tensor(v) for k, v in collected.items()}
