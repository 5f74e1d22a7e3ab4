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
    from megakit.training import ExactStrategy

    strategy: Any = ExactStrategy()
    strategy.trainer = SimpleNamespace(global_step=6)
    return strategy


@pytest.fixture
def step(strategy: Any) -> Any:
    """A step of an optimizer that has found the gradient to have a norm."""

    def step(norm: Any) -> Any:
        strategy._has_gradient_hooks = False
        return strategy.optimizer_step(SimpleNamespace(step=lambda closure: (1, norm, None)), None)

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


@pytest.mark.parametrize("where", ["ddp", "optimizer"])
def test_one_place_is_enough_for_the_distributed_optimizer(megatron: None, where: str) -> None:
    """NeMo lets the optimizer's config decide, whose default is no."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from nemo import lightning as nl

    from megakit.training import ExactStrategy, megatron_adam
    from model_components import BionemoLightningModule, PretrainConfig

    config = DistributedDataParallelConfig(use_distributed_optimizer=where == "ddp")
    strategy: Any = ExactStrategy(ddp=config)
    strategy.precision_plugin = nl.MegatronMixedPrecision(precision="32")
    module = BionemoLightningModule(config=PretrainConfig(), optimizer=megatron_adam(1e-3))
    module.optim.config.use_distributed_optimizer = where == "optimizer"
    strategy.connect(module)
    assert module.optim.config.use_distributed_optimizer
    assert strategy.ddp_config.use_distributed_optimizer


def test_who_listens_to_events_that_do_not_happen_is_refused(strategy: Any) -> None:
    from nemo.lightning.megatron_parallel import CallbackConnector
    from nemo.lightning.pytorch.plugins import MegatronDataSampler

    from megakit.training.checks import refuse_listeners

    class Listener:
        def on_megatron_step_end(self, **_: Any) -> None:
            """Would never be called."""

    sampler = MegatronDataSampler(1, 4, 8)
    strategy.data_sampler, strategy.model = sampler, SimpleNamespace(callbacks=CallbackConnector())
    strategy.model.callbacks.add(sampler)
    sampler.output_log = False
    refuse_listeners(strategy)
    strategy.model.callbacks.add(Listener())
    with pytest.raises(UserError, match=r"Listener\.on_megatron_step_end: ExactStrategy"):
        refuse_listeners(strategy)
    sampler.output_log = True
    with pytest.raises(UserError, match="output_log=True"):
        refuse_listeners(strategy)


def test_what_a_pipeline_stage_sends_has_the_shape_that_the_config_says(megatron: None) -> None:
    """The next stage would wait without end, or read other numbers."""
    import torch

    from megakit.training.schedule import check_shape

    check_shape(torch.zeros(1, 4, 3), (1, 4, 3))
    with pytest.raises(UserError, match=r"\(1, 4, 3\), and .* \(1, 4, 64\): .*stage_shape"):
        check_shape(torch.zeros(1, 4, 3), (1, 4, 64))
