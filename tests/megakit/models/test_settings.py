"""Settings in a checkpoint are those at the time it was saved."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("megatron")


def config(**settings: Any) -> Any:
    from tests.megakit.models.networks import NetConfig

    return NetConfig(**settings)


def test_a_checkpoint_contains_the_settings_of_its_time(tmp_path: Path) -> None:
    from nemo.lightning import io

    from megakit.checkpoints import read_model_settings
    from megakit.checkpoints.context import write_context
    from tests.megakit.models.networks import Module

    mine = config(hidden_size=16, hidden_dropout=0.25)
    module = Module(mine)
    mine.initial_ckpt_skip_keys_with_these_prefixes = {"head"}
    mine.grad_scale_func = lambda loss: loss * 2  # as NeMo's strategy does; not recorded
    assert (mine.grad_scale_func(1), mine.get_hparam("grad_scale_func")) == (2, None)
    write_context(tmp_path / "context", module)
    mine.hidden_size = 32
    write_context(tmp_path / "later" / "context", module)

    settings = read_model_settings(tmp_path)
    assert (settings["hidden_size"], settings["hidden_dropout"]) == (16, 0.25)
    assert settings["initial_ckpt_skip_keys_with_these_prefixes"] == {"head"}
    assert read_model_settings(tmp_path / "later")["hidden_size"] == 32
    loaded = io.load_context(tmp_path / "later" / "context", "model").config  # NeMo's reader
    assert (type(loaded), loaded.hidden_size) == (type(mine), 32)


@pytest.mark.parametrize("also_change_value", [True, False])
def test_set_hparam(also_change_value: bool) -> None:
    mine = config(hidden_size=16)
    mine.set_hparam("hidden_size", 64, also_change_value=also_change_value)
    assert mine.get_hparam("hidden_size") == mine.get_hparams()["hidden_size"] == 64
    assert mine.hidden_size == (64 if also_change_value else 16)


def test_defaults_are_read_but_not_listed() -> None:
    mine = config()
    assert mine.get_hparam("hidden_size") == mine.hidden_size
    assert mine.get_hparam("initial_ckpt_skip_keys_with_these_prefixes") == set()  # by a factory
    assert "hidden_size" not in mine.get_hparams()
    assert "initial_ckpt_skip_keys_with_these_prefixes" not in mine.get_hparams()
    mine.hidden_size = 64
    assert mine.get_hparams()["hidden_size"] == 64
    assert mine.get_non_default_hparams() == list(mine.get_hparams())
    with pytest.raises(KeyError, match="no constructor argument 'hiden_size'"):
        mine.get_hparam("hiden_size")


def test_a_base_class_may_set_what_its_subclass_records() -> None:
    from nemo.lightning import io

    from megakit.models import IOMixinWithGettersSetters, WillHaveGetSetHparam

    @dataclass
    class Base(WillHaveGetSetHparam):
        width: int = 3

        def double(self) -> None:
            self.set_hparam("width", 2 * self.width)

    @dataclass
    class Recorded(Base, IOMixinWithGettersSetters):
        depth: int = 4

    mine = Recorded(width=5)
    mine.double()
    assert (mine.width, mine.get_hparams()) == (10, {"width": 10})
    assert io.reinit(mine) == Recorded(width=10)
    with pytest.raises(TypeError, match="abstract"):
        Base()  # type: ignore[abstract]


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy])
def test_a_copy_records_its_own_changes(copying: Any) -> None:
    mine = config(hidden_size=16)
    copied = copying(mine)
    copied.hidden_size = 32
    assert (copied.hidden_size, copied.get_hparam("hidden_size")) == (32, 32)
    assert (mine.hidden_size, mine.get_hparam("hidden_size")) == (16, 16)
