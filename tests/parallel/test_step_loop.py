"""The loop of steps in real trainings: hooks, validation, loggers, and what pipeline stages see."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from megakit.testing import Ranks
from tests.parallel import jobs
from tests.scripts import read_csv


def fit(layout: Any, folder: Path) -> Any:
    """Fine-tunes for some steps; returns the events that a callback and a module saw."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    from megakit.training import train
    from model_components import BionemoLightningModule

    script = importlib.import_module("model_finetune")
    intervals = {"max_steps": 5, "val_interval": 2, "save_interval": 5}
    options = jobs.options_of("finetune", folder, checkpoint="none", **intervals)
    events: list[tuple[str, int]] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            events.append(("start", trainer.global_step))

        def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
            events.append(("gradients", trainer.global_step))

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            events.append(("end", trainer.global_step))

        def on_validation_start(self, trainer: Any, *args: Any) -> None:
            events.append(("validation", trainer.global_step))

        def __deepcopy__(self, memo: object) -> Watch:
            return self

    class Module(BionemoLightningModule):
        def optimizer_step(self, *args: Any) -> None:
            _, index, optimizer, closure = args
            events.append(("module", index))
            optimizer.step(closure=closure)

        def training_step(self, batch: Any, batch_idx: int | None = None) -> Any:
            self.log("train_two", 2.0, logger=False, batch_size=1)
            return super().training_step(batch, batch_idx)

        def training_loss_reduction(self) -> Any:
            events.append(("loss", self.trainer.global_step))  # it may depend on the step
            return super().training_loss_reduction()

        validation_loss_reduction = BionemoLightningModule.training_loss_reduction

    run = jobs.make_run(script.FINETUNE, options, layout)
    module, data, trainer = jobs.built_by(script.finetune, run)
    module.__class__ = Module
    trainer.callbacks.insert(0, Watch())
    trainer.loggers = [*trainer.loggers, CSVLogger(folder, name="csv", version="")]
    train(model=module, data=data, trainer=trainer)
    logged = {n: float(v) for n, v in trainer.callback_metrics.items()}
    return events, logged


def test_hooks_validations_and_values(ranks: Ranks, tmp_path: Path) -> None:
    """Every stage and every logger gets the values."""
    layout = jobs.layout(world_size=2, pipeline=2)
    (_, first), (events, logged) = ranks.run(fit, layout, tmp_path, world_size=2)
    expected = [("loss", 0)]  # for the checks before the first step
    for step in range(5):
        expected += [(name, step) for name in ("start", "module", "loss", "gradients")]
        expected.append(("end", step + 1))
        if step + 1 in (2, 4, 5):  # the interval, and the last step
            expected.append(("validation", step + 1))
    assert events == expected
    assert logged.pop("train_two") == 2
    assert first == logged
    rows = read_csv(tmp_path / "finetune" / "metrics.csv")
    assert logged["train_loss"] == pytest.approx(float(rows[-1]["train_loss"]), rel=1e-5)
    others = read_csv(tmp_path / "csv" / "metrics.csv")
    for name in ("step", "train_loss", "val_loss", "val_accuracy", "lr", "grad_norm"):
        found, written = ([float(row[name] or 0) for row in table] for table in (others, rows))
        assert found == pytest.approx(written, rel=1e-5), name
