"""What a trainer takes from its options, its layout and the checkpoint to resume from."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from megakit.errors import UserError
from tests import fabricate
from tests.parallel import jobs

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a trainer for a pretraining with some options."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def build(resume: Path | None = None, callbacks: Any = (), **options: Any) -> Any:
        from megakit.training import build_trainer

        script = importlib.import_module("model_pretrain")
        chosen = script.PretrainOptions(output_dir=tmp_path, dataset="digits", **options)
        run = jobs.make_run(script.PRETRAIN, chosen, jobs.layout())
        run.plan = replace(run.plan, resume=str(resume) if resume else None)
        make_view = script.PRETRAIN.view
        return build_trainer(run, make_view=make_view, callbacks=callbacks)

    return build


def reporter_of(trainer: Any) -> Any:
    from megakit.training.progress import Reporter
    from megakit.training.validation import callbacks_of

    (reporter,) = callbacks_of(trainer, Reporter)
    return reporter


def test_options_reach_the_trainer(build: Any, tmp_path: Path) -> None:
    trainer = build(
        max_steps=7,
        val_interval=3,
        save_interval=5,
        limit_val_batches=2,
        precision="32",
        timeout=77,
    )
    assert trainer.max_steps == 7
    assert (trainer.val_check_interval, trainer.check_val_every_n_epoch) == (3, None)
    assert trainer.limit_val_batches == 2  # an int: batches, not a share
    assert trainer.num_sanity_val_steps == 0
    assert trainer.checkpoint_callback.every_n_steps == 5
    assert trainer.checkpoint_callback.copied == [tmp_path / "pretrain" / "metrics.csv"]
    assert trainer.precision == "32-true"
    assert trainer.strategy.timeout == 77


def test_a_whole_validation_is_the_default(build: Any) -> None:
    limit = build().limit_val_batches
    assert isinstance(limit, float)  # a share
    assert limit == 1


def test_a_trainer_of_the_reader_s_own_keeps_its_progress_bar() -> None:
    """NeMo would otherwise print a line for each step."""
    from lightning.pytorch.callbacks import TQDMProgressBar
    from nemo.lightning.pytorch.strategies.utils import fix_progress_bar

    from megakit.training import build_strategy

    trainer: Any = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    fix_progress_bar(trainer, build_strategy(jobs.layout()).replace_progress_bar)
    assert isinstance(trainer.progress_bar_callback, TQDMProgressBar)


def test_callbacks_run_in_the_order_that_they_need(build: Any) -> None:
    """Values that a user's callback logs are reported; what is reported is saved."""
    mine = pl.Callback()
    names = [type(callback).__name__ for callback in build(callbacks=[mine]).callbacks]
    ours = ["ExactValidation", "Callback", "Pictures", "Reporter"]
    ours += ["StopOnSignal", "CheckpointWriter"]
    assert [name for name in names if name in ours] == ours
    assert "StopWithoutProgress" not in names
    names = [type(callback).__name__ for callback in build(stop_after=2).callbacks]
    assert names.index("StopWithoutProgress") < names.index("Pictures")


def test_a_name_to_choose_by_is_tried_before_training(build: Any) -> None:
    trainer = build(best_by="val_accuracy")
    assert trainer.num_sanity_val_steps == 1
    assert "StopWithoutProgress" in [type(callback).__name__ for callback in trainer.callbacks]
    assert trainer.checkpoint_callback.best_by == "val_accuracy"


@pytest.mark.parametrize("final", [False, True])
def test_a_resumed_run_goes_on_from_its_checkpoint(build: Any, tmp_path: Path, final: bool) -> None:
    """With the rows that the checkpoint has; a run that stopped early makes no further step."""
    from megakit.checkpoints.manifest import read_manifest, write_manifest
    from megakit.reporting.metrics import Metrics, MetricsFile

    path = tmp_path / "pretrain" / "metrics.csv"
    path.parent.mkdir()
    file = MetricsFile(path)
    for step in (1, 10, 20):
        file.append(Metrics(step, 64 * step, train_loss=1 / step))
    checkpoint = fabricate.make_checkpoint(path.parent / "checkpoints", 10)
    path.rename(checkpoint / "metrics.csv")
    write_manifest(checkpoint, replace(read_manifest(checkpoint), final=final))
    trainer = build(checkpoint, max_steps=30)
    assert trainer.max_steps == (10 if final else 30)
    assert [row.step for row in reporter_of(trainer).metrics_file.kept] == [1, 10]
    assert reporter_of(trainer).tensorboard.after == 10
    assert trainer.logger._kwargs["purge_step"] == 11


@pytest.mark.parametrize("in_epoch", [6, 2], ids=["first epoch", "second epoch"])
def test_lightning_counts_the_batches_of_all_completed_steps(in_epoch: int) -> None:
    """Its counters in a checkpoint are one step behind."""
    from megakit.training.callbacks import ExactSteps

    trainer: Any = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    loop = trainer.fit_loop.epoch_loop
    loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 7
    loop.batch_progress.total.ready, loop.batch_progress.total.completed = 7, 6
    loop.batch_progress.current.completed = in_epoch
    trainer.val_check_batch = 5
    loop._should_check_val_fx = lambda fetcher: True
    trainer.fit_loop._data_fetcher = SimpleNamespace(fetched=0)
    ExactSteps().on_train_start(trainer, None)  # type: ignore[arg-type]
    names = ("ready", "started", "processed", "completed")
    total, current = loop.batch_progress.total, loop.batch_progress.current
    assert [getattr(total, name) for name in names] == [7] * 4
    assert [getattr(current, name) for name in names] == [in_epoch + 1] * 4


@pytest.mark.parametrize("count", [0, 2])
def test_too_few_gpus_of_another_machine(
    build: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Rank 0 has checked its own machine only; without this check, ranks would share GPUs."""
    layout = jobs.layout(world_size=4)
    run: Any = SimpleNamespace(layout=layout, accelerator=SimpleNamespace(name="gpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    from megakit.training.trainer import _devices

    with pytest.raises(UserError, match=f"has {count} GPUs for 4 processes"):
        _devices(run)


def test_float32_is_not_tf32_by_torchs_newer_settings(build: Any) -> None:
    """They override the older ones."""
    parts = [torch.backends.cudnn.conv, torch.backends.cudnn.rnn]  # type: ignore[attr-defined]
    before = [part.fp32_precision for part in parts]
    try:
        for part in parts:
            part.fp32_precision = "tf32"
        build(precision="32")
        assert [part.fp32_precision for part in parts] == ["ieee", "ieee"]
    finally:
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision


@pytest.mark.parametrize(("precision", "is_full"), [("32", True), ("bf16-mixed", False)])
def test_float32_is_not_tf32(build: Any, precision: str, is_full: bool) -> None:
    """Matrix products are in TF32 where NVIDIA's images set a variable, convolutions everywhere."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        build(precision=precision)
        assert (torch.get_float32_matmul_precision() == "highest") == is_full
        assert torch.backends.cudnn.allow_tf32 != is_full
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
