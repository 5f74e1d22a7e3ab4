"""A callback that collects what steps return."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor


class MetricTracker(pl.Callback):
    """Collects what the steps return, for a look at it after training.

    Args:
        metrics_to_track_val: Keys of validation outputs; an output that is a bare tensor goes
            under "unnamed".
        metrics_to_track_train: The same of training outputs.

    Attributes:
        collection_val: A tensor of values for each key, and `logged_metrics`: one dict of all that
            was logged for each validation.
        collection_train: The same of training, one dict for each epoch.
    """

    def __init__(
        self, metrics_to_track_val: Sequence[str], metrics_to_track_train: Sequence[str]
    ) -> None:
        self.metrics_to_track_val = list(metrics_to_track_val)
        self.metrics_to_track_train = list(metrics_to_track_train)
        self._val: dict[str, list[Any]] = defaultdict(list)
        self._train: dict[str, list[Any]] = defaultdict(list)

    @staticmethod
    def _collect(into: dict[str, list[Any]], outputs: Any, keys: list[str]) -> None:
        if isinstance(outputs, Tensor):
            into["unnamed"].append(outputs)
        else:
            for key in keys:
                into[key].append(outputs[key])

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, *args: Any
    ) -> None:
        """Collects what a validation step returned."""
        self._collect(self._val, outputs, self.metrics_to_track_val)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        """Collects what a training step returned."""
        self._collect(self._train, outputs, self.metrics_to_track_train)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Collects what was logged of this validation."""
        self._val["logged_metrics"].append(dict(trainer.logged_metrics))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Collects what was logged of this epoch."""
        self._train["logged_metrics"].append(dict(trainer.logged_metrics))

    @staticmethod
    def _as_tensors(collected: dict[str, list[Any]]) -> dict[str, Any]:
        tensors = {k: torch.tensor(v) for k, v in collected.items() if k != "logged_metrics"}
        return {**tensors, "logged_metrics": list(collected.get("logged_metrics", []))}

    @property
    def collection_val(self) -> dict[str, Any]:
        """What validation returned, by key."""
        return self._as_tensors(self._val)

    @property
    def collection_train(self) -> dict[str, Any]:
        """What training returned, by key."""
        return self._as_tensors(self._train)
