"""What a trainer refuses: wrong gradients, listeners that hear nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megakit.checkpoints import read_manifest
from megakit.checkpoints.manifest import verify
from megakit.errors import UserError
from tests.scripts import read_csv, run_script

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def strategy() -> Any:
    from megakit.training import ExactStrategy

    return ExactStrategy()


@pytest.mark.long
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
    assert "Earlier checkpoints are not changed. Check the loss and the data" in line
    run = tmp_path / "pretrain"
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name == "step=000001"
    assert verify(checkpoint) == read_manifest(checkpoint)
    assert [row["step"] for row in read_csv(run / "metrics.csv")] == ["1"]


@pytest.mark.parametrize("setting", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.5}])
def test_what_megatron_does_with_gradients_is_no_setting_of_the_trainer(
    setting: dict[str, Any],
) -> None:
    from megakit.nemo.step_loop import use_step_loop

    settings = {"accumulate_grad_batches": 1, "gradient_clip_val": None, **setting}
    trainer: Any = SimpleNamespace(**settings)
    with pytest.raises(UserError, match=rf"Leave .*{next(iter(setting))}.* out of the trainer"):
        use_step_loop(trainer)


def test_a_checkpoint_of_another_loop_is_not_resumed() -> None:
    from megakit.nemo.step_loop import StepLoop

    loop = StepLoop(SimpleNamespace())
    loop.on_load_checkpoint(StepLoop(SimpleNamespace()).on_save_checkpoint() | {"step": 3})
    assert loop.global_step == 3
    with pytest.raises(UserError, match=r"loop of NeMo or Lightning.*initial_ckpt_path"):
        loop.on_load_checkpoint({"_batches_that_stepped": 25})  # all that Lightning's loop saves


def test_who_listens_to_events_that_do_not_happen_is_refused(strategy: Any) -> None:
    from nemo.lightning.megatron_parallel import CallbackConnector
    from nemo.lightning.pytorch.plugins import MegatronDataSampler

    from megakit.nemo.refusals import refuse_listeners

    class Listener:
        def on_megatron_step_end(self, **_: Any) -> None:
            """Would never be called."""

    strategy.data_sampler = MegatronDataSampler(1, 4, 8, output_log=False)
    strategy.model = SimpleNamespace(callbacks=CallbackConnector())
    refuse_listeners(strategy)
    strategy.model.callbacks.add(Listener())
    with pytest.raises(UserError, match=r"Listener\.on_megatron_step_end: ExactStrategy"):
        refuse_listeners(strategy)


def wrong_gradients(model: Any, loss: object = None) -> str:
    """Returns why a model would train wrongly without an error, or nothing."""
    from megakit.nemo.refusals import refuse_wrong_gradients

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
    assert "NextTokenLoss needs calculate_per_token_loss=True" in wrong_gradients(
        model, NextTokenLoss()
    )
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


def test_a_model_without_pipeline_stages_is_advised_to_use_one() -> None:
    """It computes all of its layers on each stage."""
    import torch

    from megakit.nemo.micro_batches import check_shape

    check_shape(torch.zeros(1, 4, 3), (1, 4, 3))
    for output, found in ((torch.zeros(4, 10), r"\(4, 10\)"), ({"x_hat": 0}, "dict")):
        told = f"returned {found}, and .*does not split .*, use --pipeline-parallel 1; otherwise"
        with pytest.raises(UserError, match=told):
            check_shape(output, (1, 4, 3))
