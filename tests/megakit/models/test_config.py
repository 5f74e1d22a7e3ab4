"""A config builds its model from a checkpoint, and writes its settings into another one."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:.*no manifest"),
]


def config(**settings: Any) -> Any:
    from tests.megakit.models.networks import NetConfig

    return NetConfig(**settings)


@pytest.fixture(scope="module")
def checkpoint(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with other sizes than the defaults, in another precision."""
    from tests.megakit.models.networks import save_checkpoint

    model = config(hidden_size=24, hidden_dropout=0.25, seed=5).configure_model()
    model.config.num_classes = 9  # in the context only
    model.config.bf16 = True
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), model)


def test_settings_come_from_the_checkpoint_except_for_those_kept(checkpoint: Path) -> None:
    class Loss:
        pass

    mine = config(seed=1, loss_cls=Loss)
    mine.load_settings_from_checkpoint(checkpoint)
    assert (mine.hidden_size, mine.hidden_dropout) == (24, 0.25)
    assert mine.num_classes == 3  # in NetConfig's override_parent_fields
    assert (mine.seed, mine.bf16, mine.get_loss_reduction_class()) == (1, False, Loss)


def test_a_checkpoint_contains_the_settings_of_its_time(tmp_path: Path) -> None:
    from nemo.lightning import io

    from megakit.checkpoints import read_model_settings
    from megakit.nemo.writer import write_context
    from tests.megakit.models.networks import Module

    mine = config(hidden_size=16)
    module = Module(mine)
    mine.grad_scale_func = lambda loss: loss * 2  # as NeMo's strategy does; not recorded
    assert (mine.grad_scale_func(1), mine.get_hparam("grad_scale_func")) == (2, None)
    write_context(tmp_path / "context", module)
    mine.hidden_size = 32
    write_context(tmp_path / "later" / "context", module)

    assert read_model_settings(tmp_path)["hidden_size"] == 16
    loaded = io.load_context(tmp_path / "later" / "context", "model").config  # NeMo's reader
    assert (type(loaded), loaded.hidden_size) == (type(mine), 32)
