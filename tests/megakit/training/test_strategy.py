"""What our strategy does at a step besides what NeMo's does: it looks at the gradient's norm."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megakit.checkpoints import read_manifest
from megakit.checkpoints.manifest import verify
from megakit.errors import UserError
from tests.scripts import read_csv, run_script


@pytest.fixture
def strategy(megatron: None) -> Any:
    from megakit.job.layout import Layout
    from megakit.training.trainer import build_strategy

    strategy = build_strategy(Layout(1, 1, 1, 1, 8, 8))
    strategy.trainer = SimpleNamespace(global_step=6)
    return strategy


@pytest.fixture
def step(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A step of an optimizer that has found the gradient to have a norm."""
    from lightning.pytorch.strategies import DDPStrategy

    def step(norm: Any) -> Any:
        monkeypatch.setattr(DDPStrategy, "optimizer_step", lambda *args, **kwargs: (1, norm, None))
        return strategy.optimizer_step(None, None)

    return step


def test_in_the_first_step_the_weights_are_the_reason(step: Any) -> None:
    """A checkpoint may hold finite weights that no gradient can be computed with."""
    with pytest.raises(UserError, match=r"^Step 7: the gradient's norm is inf with the weights"):
        step(math.inf)


def test_training_that_goes_wrong_keeps_its_checkpoints(tmp_path: Path) -> None:
    done = run_script(
        *("model_pretrain.py", "--dataset", "digits", "--data-dir", tmp_path / "no-data"),
        *("--accelerator", "cpu", "--precision", "32", "--output-dir", tmp_path),
        *("--lr", "100", "--max-steps", 5, "--save-interval", 1, "--val-interval", 5),
    )
    assert done.status == 1
    assert done.out == ""
    (line,) = [line for line in done.err.splitlines() if "gradient's norm" in line]
    assert "Step 2: the gradient's norm is inf." in line
    assert "Earlier checkpoints are not changed. Use a lower --lr." in line
    run = tmp_path / "pretrain"
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name == "step=000001"
    assert verify(checkpoint) == read_manifest(checkpoint)
    assert [row["step"] for row in read_csv(run / "metrics.csv")] == ["1"]


def test_nemos_own_sampler_is_told_what_a_loader_is_for(strategy: Any) -> None:
    """To it, a loader without a mode is one of training, which starts at the consumed samples."""
    from lightning.pytorch.trainer.states import RunningStage
    from nemo.lightning.pytorch.plugins import MegatronDataSampler
    from torch.utils.data import DataLoader

    numbers: Any = range(24)
    strategy.data_sampler = MegatronDataSampler(1, 4, 8, init_consumed_samples=16)
    for stage, first in ((RunningStage.VALIDATING, 0), (RunningStage.TRAINING, 16)):
        strategy.trainer.state = SimpleNamespace(stage=stage)
        loader = strategy.process_dataloader(DataLoader(numbers, batch_size=4))
        assert next(iter(loader)).tolist() == list(range(first, first + 4))
