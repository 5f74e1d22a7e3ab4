"""The loop of steps in real trainings: hooks, validation, loggers, and what pipeline stages see."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

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


def fit_with_noise(folder: Path, resume: str | None = None) -> tuple[list[float], str]:
    """Trains with noise that no layer draws; returns the losses, and a copy of a checkpoint."""
    import lightning.pytorch as pl
    import torch
    from torch.nn.functional import dropout

    from megakit.training import train

    script = importlib.import_module("model_pretrain")
    intervals = {"max_steps": 4, "val_interval": 4, "save_interval": 2}
    options = jobs.options_of("pretrain", folder, **intervals)
    losses: list[float] = []
    kept = folder / "kept" / "step=000002"  # the run keeps its last and its best one

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            losses.append(float(outputs["loss"]))
            if trainer.global_step == 3 and resume is None:
                shutil.copytree(folder / "pretrain" / "checkpoints" / kept.name, kept)

        def __deepcopy__(self, memo: object) -> Watch:
            return self

    def draw(module: Any, inputs: tuple[Any, ...]) -> None:
        """Draws in validation, too."""
        noise = torch.randn_like(inputs[0]["data"])
        inputs[0]["data"] = dropout(inputs[0]["data"] + noise, training=module.training)

    run = jobs.make_run(script.PRETRAIN, options, jobs.layout(), resume=resume)
    module, data, trainer = jobs.built_by(script.pretrain, run)
    module.register_forward_pre_hook(draw)
    trainer.callbacks.append(Watch())
    train(model=module, data=data, trainer=trainer, resume=resume)
    return [*losses, float(trainer.callback_metrics["val_loss"])], str(kept)


def test_random_numbers_without_a_layer_are_the_same_after_a_resumption(
    ranks: Ranks, tmp_path: Path
) -> None:
    ((whole, kept),) = ranks.run(fit_with_noise, tmp_path, world_size=1)
    ((resumed, _),) = ranks.run(fit_with_noise, tmp_path, kept, world_size=1)
    assert len(set(whole)) == 5
    assert resumed == whole[2:]


def fit_tied(folder: Path, is_tied: bool) -> tuple[list[str], Any]:
    """Trains copies of one weight on two pipeline stages; returns what is told, and the copy."""
    import torch

    from megakit.models import seeded
    from megakit.training import train
    from model_components import PretrainModel

    class Tied(PretrainModel):
        """Uses a weight on both stages, each of which has a copy."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.share_embeddings_and_output_weights = is_tied
            with seeded(config.seed, "tied"):
                weight: Any = torch.nn.Parameter(torch.randn(config.latent_size))
            if is_tied:
                weight.shared_embedding, weight.shared = True, self.post_process
            self.register_parameter("first" if self.pre_process else "last", weight)

        def shared_embedding_or_output_weight(self) -> Any:
            return self.first if self.pre_process else self.last

        def forward(self, x: Any) -> Any:
            if self.pre_process:
                return super().forward(x) * self.first
            self.input_tensor = self.input_tensor + self.last
            return super().forward(x)

    script = importlib.import_module("model_pretrain")
    options = jobs.options_of("pretrain", folder, max_steps=3, val_interval=3, save_interval=3)
    run = jobs.make_run(script.PRETRAIN, options, jobs.layout(world_size=2, pipeline=2))
    told: list[str] = []
    vars(run.console)["say"] = told.append
    module, data, trainer = jobs.built_by(script.pretrain, run)
    module.config.model_cls = Tied
    with mock.patch("megakit.nemo.writer.write_context"):  # which names a class's module
        train(model=module, data=data, trainer=trainer)
    weights = {name.split(".")[-1]: weight for name, weight in module.named_parameters()}
    (copy,) = [weights[name].tolist() for name in ("first", "last") if name in weights]
    return [line for line in told if "Warning" in line], copy


@pytest.mark.parametrize("is_tied", [True, False])
def test_copies_of_one_weight_stay_equal_or_are_named(
    ranks: Ranks, tmp_path: Path, is_tied: bool
) -> None:
    (told, first), (_, last) = ranks.run(fit_tied, tmp_path, is_tied, world_size=2)
    assert (first == last) == is_tied
    assert len(told) == (0 if is_tied else 1)
    assert is_tied or "Warning: first and last, of two pipeline stages, begin equal" in told[0]
