"""Skips the hooks of a training step that no callback and no module overrides.

Lightning calls each hook of each callback and of the module, even the empty hook of the base class.
For each call, Lightning sets an attribute of the module and opens a context of the profiler.
"""

import functools
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer import call

from megakit.runtime.patching import patch, require_attribute

#: Hooks that Lightning calls at each step, and whose methods in its base classes are empty.
STEP_HOOKS = {
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
}

#: The empty methods. A method that another library puts into a base class later is not empty.
_EMPTY = {
    require_attribute(base, name)
    for base in (pl.Callback, pl.LightningModule)
    for name in STEP_HOOKS
}


@functools.cache
def skip_empty_hooks() -> None:
    """Replaces Lightning's two functions that call hooks, once per process."""
    of_callbacks = require_attribute(call, "_call_callback_hooks")
    of_module = require_attribute(call, "_call_lightning_module_hook")

    @functools.wraps(of_callbacks)
    def call_callbacks(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> None:
        if hook_name not in STEP_HOOKS or not all(
            _is_empty(callback, hook_name) for callback in trainer.callbacks
        ):
            of_callbacks(trainer, hook_name, *args, **kwargs)

    @functools.wraps(of_module)
    def call_module(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        module = kwargs.get("pl_module") or trainer.lightning_module
        if hook_name in STEP_HOOKS and _is_empty(module, hook_name):
            return None
        return of_module(trainer, hook_name, *args, **kwargs)

    patch(call, "_call_callback_hooks", call_callbacks)
    patch(call, "_call_lightning_module_hook", call_module)


def _is_empty(owner: object, hook_name: str) -> bool:
    """Returns whether an object's hook is the empty method of Lightning's base class."""
    return getattr(getattr(owner, hook_name), "__func__", None) in _EMPTY
