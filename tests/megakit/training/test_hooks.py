"""Hooks of a step that nobody overrides are skipped; those that somebody overrides are called."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

HOOKS = [
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
]


@pytest.fixture
def call(megatron: None) -> Any:
    from lightning.pytorch.trainer import call

    from megakit.training.hooks import skip_empty_hooks

    skip_empty_hooks()
    return call


@pytest.fixture
def trainer(megatron: None) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.profilers import PassThroughProfiler

    profiler = mock.Mock(wraps=PassThroughProfiler())
    module, callbacks = pl.LightningModule(), [pl.Callback(), pl.Callback()]
    return SimpleNamespace(lightning_module=module, callbacks=callbacks, profiler=profiler)


def empty(*args: Any) -> None:
    """Does nothing."""


@pytest.mark.parametrize("hook", HOOKS)
def test_lightnings_own_are_empty(megatron: None, hook: str) -> None:
    import lightning.pytorch as pl

    for base in (pl.Callback, pl.LightningModule):
        assert getattr(base, hook).__code__.co_code == empty.__code__.co_code


@pytest.mark.parametrize("hook", HOOKS)
def test_empty_hooks_are_skipped(call: Any, trainer: Any, hook: str) -> None:
    call._call_callback_hooks(trainer, hook, "batch")
    assert call._call_lightning_module_hook(trainer, hook, "batch") is None
    trainer.profiler.profile.assert_not_called()


def test_a_hook_that_another_library_puts_into_a_base_class_is_called(
    call: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lightning.pytorch as pl

    told = []
    for base in (pl.Callback, pl.LightningModule):
        monkeypatch.setattr(base, HOOKS[0], lambda *args: told.append(args[-1]))
    call._call_callback_hooks(trainer, HOOKS[0], "a batch")
    call._call_lightning_module_hook(trainer, HOOKS[0], "a batch")
    assert told == ["a batch"] * 3


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("where", ["class", "object"])
def test_overridden_hooks_are_called(call: Any, trainer: Any, hook: str, where: str) -> None:
    import lightning.pytorch as pl

    told = []

    def hear(*args: Any) -> str:
        told.append((args[-1], trainer.lightning_module._current_fx_name))
        return "answer"

    module_class: Any = pl.LightningModule
    callback_class: Any = pl.Callback
    if where == "class":
        module_class = type("Own", (pl.LightningModule,), {hook: hear})
        callback_class = type("Own", (pl.Callback,), {hook: hear})
    trainer.lightning_module = module = module_class()
    trainer.callbacks = [callback := callback_class()]
    if where == "object":
        vars(module)[hook] = vars(callback)[hook] = hear
    call._call_callback_hooks(trainer, hook, "batch")
    assert call._call_lightning_module_hook(trainer, hook, "batch") == "answer"
    assert told == [("batch", hook)] * 2
    assert module._current_fx_name is None
