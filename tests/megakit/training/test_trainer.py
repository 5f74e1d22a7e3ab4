"""What a trainer refuses, and how it ends: wrong gradients, silent listeners, signals, GPUs."""

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from megakit.checkpoints import read_manifest
from megakit.checkpoints.manifest import verify
from megakit.errors import UserError
from megakit.runtime.signals import STOP_SIGNALS
from tests.parallel import jobs
from tests.scripts import read_csv, run_script

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def strategy() -> Any:
    from megakit.training import ExactStrategy

    strategy: Any = ExactStrategy()
    strategy.trainer = SimpleNamespace(global_step=6)
    return strategy


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


def test_in_the_first_step_the_weights_are_the_reason(strategy: Any) -> None:
    """A checkpoint may hold finite weights that no gradient can be computed with."""
    strategy._has_gradient_hooks = False
    optimizer = SimpleNamespace(step=lambda closure: (1, float("inf"), None))
    with pytest.raises(UserError, match=r"^Step 7: the gradient's norm is inf with the weights"):
        strategy.optimizer_step(optimizer, None)


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
def test_one_place_is_enough_for_the_distributed_optimizer(where: str) -> None:
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

    strategy.data_sampler = MegatronDataSampler(1, 4, 8, output_log=False)
    strategy.model = SimpleNamespace(callbacks=CallbackConnector())
    refuse_listeners(strategy)
    strategy.model.callbacks.add(Listener())
    with pytest.raises(UserError, match=r"Listener\.on_megatron_step_end: ExactStrategy"):
        refuse_listeners(strategy)


def test_what_a_pipeline_stage_sends_has_the_shape_that_the_config_says() -> None:
    """The next stage would wait without end, or read other numbers."""
    from megakit.training.schedule import check_shape

    check_shape(torch.zeros(1, 4, 3), (1, 4, 3))
    with pytest.raises(UserError, match=r"\(1, 4, 3\), and .* \(1, 4, 64\): .*stage_shape"):
        check_shape(torch.zeros(1, 4, 3), (1, 4, 64))


def wrong_gradients(model: Any, loss: object = None) -> str:
    """Why a model would train wrongly without an error, or nothing."""
    from megakit.training.checks import refuse_wrong_gradients

    try:
        refuse_wrong_gradients(model.config, model, loss)
    except UserError as error:
        return str(error)
    return ""


def test_models_that_would_train_wrongly_are_refused() -> None:
    """With sequence parallelism, ranks that all have the whole sequence would add gradients."""
    from examples.gpt.gpt_components import GptConfig, NextTokenLoss
    from model_components import MSELossReduction, PretrainConfig

    sizes: Any = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "block_size": 16}
    model = GptConfig(**sizes).configure_model()
    assert wrong_gradients(model, NextTokenLoss()) == ""
    assert "MSELossReduction returns means" in wrong_gradients(model, MSELossReduction())
    model.config.calculate_per_token_loss = False
    assert wrong_gradients(model, MSELossReduction()) == ""
    model.config.sequence_parallel = True
    assert wrong_gradients(model) == ""
    model.embedding.scatter_to_sequence_parallel = False
    assert "no layer of the model divides the sequence" in wrong_gradients(model)
    autoencoder: Any = PretrainConfig().configure_model()
    assert wrong_gradients(autoencoder) == ""
    autoencoder.config.sequence_parallel = True
    assert "no layer of the model divides the sequence" in wrong_gradients(autoencoder)
    autoencoder.divides_sequence = True
    assert wrong_gradients(autoencoder) == ""


def test_accumulation_is_megatron_s() -> None:
    from megakit.training.loop import use_step_loop

    trainer = pl.Trainer(accelerator="cpu", logger=False, accumulate_grad_batches=2)
    with pytest.raises(UserError, match="accumulate_grad_batches=2: Megatron accumulates"):
        use_step_loop(trainer)


def test_a_second_signal_ends_at_once_and_handlers_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one lets the step end and saves: tests/faults."""
    from megakit.training.callbacks import StopOnSignal

    raised: list[int] = []
    now = [100.0]
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop: Any = StopOnSignal(None)  # type: ignore[arg-type]
    stop.setup(None, None, "fit")
    handler: Any = signal.getsignal(signal.SIGTERM)
    for seconds, expected in ((0, []), (0.1, []), (1, [signal.SIGTERM])):
        now[0] += seconds
        handler(signal.SIGTERM, None)
        assert raised == expected
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    stop.teardown(None, None, "fit")
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


@pytest.mark.parametrize(("visible", "numbers"), [(4, [0, 1, 2, 3]), (1, [0, 0, 0, 0]), (2, None)])
def test_each_process_has_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: int, numbers: list[int] | None
) -> None:
    """With Slurm's `--gpus-per-task=1`, a process sees only one GPU."""
    from megakit.job import Run

    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    layout, accelerator = jobs.layout(world_size=4), SimpleNamespace(name="gpu")
    devices: Any = Run.devices
    run = SimpleNamespace(layout=layout, accelerator=accelerator)
    if numbers is not None:
        assert devices.fget(run) == [torch.device("cuda", number) for number in numbers]
    else:  # rank 0 has checked its own machine only
        with pytest.raises(UserError, match="has 2 GPUs for 4 processes"):
            devices.fget(run)
