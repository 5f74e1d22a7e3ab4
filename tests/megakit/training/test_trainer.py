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


def test_each_process_sees_only_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Slurm's `--gpus-per-task=1`; Lightning refuses GPUs that it cannot see."""
    from megakit.job import Run
    from megakit.training import ExactStrategy

    run: Any = SimpleNamespace(
        layout=jobs.layout(world_size=4), accelerator=SimpleNamespace(name="gpu")
    )
    for visible, devices in ((4, 4), (1, "auto")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        assert Run.devices.fget(run) == devices  # type: ignore[attr-defined]
    strategy: Any = ExactStrategy()
    monkeypatch.setattr(type(strategy), "local_rank", 3)
    strategy.parallel_devices = [torch.device("cuda", 0)]
    assert strategy.root_device == torch.device("cuda", 0)
