"""What a trainer takes from its options and its layout."""

import importlib
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
        from megakit.training import build_trainer

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
    assert trainer.num_sanity_val_steps == 0
    assert trainer.checkpoint_callback.every_n_steps == 5
    assert trainer.checkpoint_callback.copied == [tmp_path / "pretrain" / "metrics.csv"]
    assert trainer.precision == "32-true"
    assert trainer.strategy.timeout == 77


def test_a_trainer_of_the_reader_s_own_keeps_its_progress_bar() -> None:
    """NeMo would otherwise print a line for each step."""
    from lightning.pytorch.callbacks import TQDMProgressBar
    from nemo.lightning.pytorch.strategies.utils import fix_progress_bar

    from megakit.training import build_strategy

    trainer: Any = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    fix_progress_bar(trainer, build_strategy(jobs.layout()).replace_progress_bar)
    assert isinstance(trainer.progress_bar_callback, TQDMProgressBar)


def test_too_few_gpus_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has checked its own machine only; without this check, ranks would share GPUs."""
    layout = jobs.layout(world_size=4)
    run: Any = SimpleNamespace(layout=layout, accelerator=SimpleNamespace(name="gpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    from megakit.training.trainer import _devices

    with pytest.raises(UserError, match="has 2 GPUs for 4 processes"):
        _devices(run)


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
