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


def test_changes_after_construction_reach_the_checkpoint(tmp_path: Path) -> None:
    from nemo.lightning import io

    from megakit.checkpoints import read_model_settings
    from megakit.checkpoints.context import write_context
    from tests.megakit.models.networks import Module

    mine = config(hidden_size=16, hidden_dropout=0.25)
    mine.hidden_size = 32
    mine.initial_ckpt_skip_keys_with_these_prefixes = {"head"}
    write_context(tmp_path / "context", Module(mine))

    settings = read_model_settings(tmp_path)
    assert settings["hidden_size"] == 32
    assert settings["hidden_dropout"] == 0.25
    assert settings["initial_ckpt_skip_keys_with_these_prefixes"] == {"head"}
    # The same by NeMo's own reader.
    loaded = io.load_context(tmp_path / "context", "model").config
    assert type(loaded) is type(mine)
    assert (loaded.hidden_size, loaded.hidden_dropout) == (32, 0.25)


def test_later_changes_do_not_reach_an_earlier_checkpoint(tmp_path: Path) -> None:
    from megakit.checkpoints import read_model_settings
    from megakit.checkpoints.context import write_context
    from tests.megakit.models.networks import Module

    mine = config(hidden_size=16)
    module = Module(mine)
    write_context(tmp_path / "context", module)
    mine.hidden_size = 32
    assert read_model_settings(tmp_path)["hidden_size"] == 16
    write_context(tmp_path / "later" / "context", module)
    assert read_model_settings(tmp_path / "later")["hidden_size"] == 32


def test_what_no_checkpoint_can_hold_is_not_recorded(tmp_path: Path) -> None:
    from megakit.checkpoints import read_model_settings
    from megakit.checkpoints.context import write_context
    from tests.megakit.models.networks import Module

    mine = config(hidden_size=16)
    before = mine.get_hparam("grad_scale_func")
    mine.grad_scale_func = lambda loss: loss * 2  # as NeMo's strategy plugs it in
    assert mine.grad_scale_func(1) == 2
    assert mine.get_hparam("grad_scale_func") is before is None
    write_context(tmp_path / "context", Module(mine))
    assert read_model_settings(tmp_path)["hidden_size"] == 16


@pytest.mark.parametrize("also_change_value", [True, False])
def test_set_hparam(also_change_value: bool) -> None:
    mine = config(hidden_size=16)
    mine.set_hparam("hidden_size", 64, also_change_value=also_change_value)
    assert mine.get_hparam("hidden_size") == 64
    assert mine.get_hparams()["hidden_size"] == 64
    assert mine.hidden_size == (64 if also_change_value else 16)


def test_defaults_are_read_but_not_listed() -> None:
    mine = config()
    assert mine.get_hparam("hidden_size") == mine.hidden_size
    assert mine.get_hparam("initial_ckpt_skip_keys_with_these_prefixes") == set()  # by a factory
    assert "hidden_size" not in mine.get_hparams()
    mine.hidden_size = 64
    assert mine.get_hparams()["hidden_size"] == 64
    assert mine.get_non_default_hparams() == list(mine.get_hparams())
    with pytest.raises(KeyError, match=r"no constructor argument 'hiden_size'.* hidden_size, "):
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


def test_a_copy_records_its_own_changes() -> None:
    mine = config(hidden_size=16)
    for copied in (copy.copy(mine), copy.deepcopy(mine)):
        assert copied.get_hparam("hidden_size") == 16
        copied.hidden_size = 32
        assert (copied.hidden_size, copied.get_hparam("hidden_size")) == (32, 32)
    assert (mine.hidden_size, mine.get_hparam("hidden_size")) == (16, 16)
