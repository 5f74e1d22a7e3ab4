"""What a trainer takes from its options and its layout."""

import importlib
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from megakit.errors import UserError
from tests.parallel import jobs

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a trainer for a pretraining with some options."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def build(**options: Any) -> Any:
        from model_components import build_trainer

        script = importlib.import_module("model_pretrain")
        chosen = script.PretrainOptions(output_dir=tmp_path, dataset="digits", **options)
        run = jobs.make_run(script.PRETRAIN, chosen, jobs.layout())
        return build_trainer(run)

    return build


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
    assert trainer.checkpoint_callback.every_n_steps == 5
    assert trainer.checkpoint_callback.copied == [tmp_path / "pretrain" / "metrics.csv"]
    assert trainer.precision == "32-true"
    assert trainer.strategy._timeout == timedelta(seconds=77)


def test_a_trainer_of_the_reader_s_own_keeps_its_progress_bar() -> None:
    """NeMo would otherwise print a line for each step."""
    from lightning.pytorch.callbacks import TQDMProgressBar
    from nemo.lightning.pytorch.strategies.utils import fix_progress_bar

    from megakit.training import ExactStrategy

    trainer: Any = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    strategy: Any = ExactStrategy()
    fix_progress_bar(trainer, strategy.replace_progress_bar)
    assert isinstance(trainer.progress_bar_callback, TQDMProgressBar)


def test_accumulation_is_megatron_s() -> None:
    from megakit.training.loop import use_step_loop

    trainer = pl.Trainer(accelerator="cpu", logger=False, accumulate_grad_batches=2)
    with pytest.raises(UserError, match="accumulate_grad_batches=2: Megatron accumulates"):
        use_step_loop(trainer)


@pytest.mark.parametrize(("visible", "numbers"), [(4, [0, 1, 2, 3]), (1, [0, 0, 0, 0])])
def test_each_process_has_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: int, numbers: list[int]
) -> None:
    """With Slurm's `--gpus-per-task=1`, a process sees only one GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert devices_of(4) == [torch.device("cuda", number) for number in numbers]


def test_too_few_gpus_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has checked its own machine only; without this check, ranks would share GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="has 2 GPUs for 4 processes"):
        devices_of(4)


def devices_of(world_size: int) -> Any:
    from megakit.job import Run

    accelerator = SimpleNamespace(name="gpu")
    run = SimpleNamespace(layout=jobs.layout(world_size=world_size), accelerator=accelerator)
    devices: Any = Run.devices
    return devices.fget(run)
