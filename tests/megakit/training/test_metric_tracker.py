"""The tracker keeps what steps return, and what was logged."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


def test_outputs_and_logged_values_are_kept() -> None:
    from megakit.training import MetricTracker

    tracker = MetricTracker(metrics_to_track_val=["loss"], metrics_to_track_train=["loss", "size"])
    trainer: Any = SimpleNamespace(logged_metrics={"val_loss": torch.tensor(0.5)})
    module: Any = None
    for loss in (3.0, 2.0):
        outputs = {"loss": torch.tensor(loss), "size": 4, "other": None}
        tracker.on_train_batch_end(trainer, module, outputs, None, 0)
        tracker.on_validation_batch_end(trainer, module, torch.tensor(loss + 1), None, 0)
    tracker.on_validation_batch_end(trainer, module, {"loss": torch.tensor(9.0)}, None, 0)
    tracker.on_validation_epoch_end(trainer, module)
    trainer.logged_metrics = {"val_loss": torch.tensor(0.25)}
    tracker.on_validation_epoch_end(trainer, module)
    tracker.on_train_epoch_end(trainer, module)

    train, val = tracker.collection_train, tracker.collection_val
    assert train.keys() == {"loss", "size", "logged_metrics"}
    assert train["loss"].tolist() == [3.0, 2.0]
    assert train["size"].tolist() == [4, 4]
    assert val["unnamed"].tolist() == [4.0, 3.0]
    assert val["loss"].tolist() == [9.0]
    assert val["logged_metrics"] == [{"val_loss": 0.5}, {"val_loss": 0.25}]
    assert train["logged_metrics"] == [{"val_loss": 0.25}]
