"""The loop of steps in a real training: which hooks and validations each step has."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from megakit.testing import Ranks
from tests.parallel import jobs


def fit(layout: Any, folder: Path) -> list[tuple[str, int]]:
    """Fine-tunes for five steps; returns the events that a callback and a module saw."""
    import lightning.pytorch as pl

    from megakit.training import train
    from model_components import BionemoLightningModule

    script = importlib.import_module("model_finetune")
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

        def training_loss_reduction(self) -> Any:
            events.append(("loss", self.trainer.global_step))  # it may depend on the step
            return super().training_loss_reduction()

        validation_loss_reduction = BionemoLightningModule.training_loss_reduction

    sizes = {"max_steps": 5, "val_interval": 2, "save_interval": 5, "checkpoint": "none"}
    run = jobs.make_run(script.FINETUNE, jobs.options_of("finetune", folder, **sizes), layout)
    module, data, trainer = jobs.built_by(script.finetune, run)
    module.__class__ = Module
    trainer.callbacks.insert(0, Watch())
    train(model=module, data=data, trainer=trainer)
    return events


def test_hooks_and_validations_of_each_step(ranks: Ranks, tmp_path: Path) -> None:
    (events,) = ranks.run(fit, jobs.layout(), tmp_path, world_size=1)
    expected = [("loss", 0)]  # for the checks before the first step
    for step in range(5):
        expected += [(name, step) for name in ("start", "module", "loss", "gradients")]
        expected.append(("end", step + 1))
        if step + 1 in (2, 4, 5):  # the interval, and the last step
            expected.append(("validation", step + 1))
    assert events == expected
