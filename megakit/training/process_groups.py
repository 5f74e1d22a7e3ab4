"""Changes how Lightning and NeMo start the processes of a job, and their process groups."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import launchers
from megatron.core import parallel_state

from megakit.runtime.patching import require_attribute

_SubprocessScriptLauncher: Any = require_attribute(launchers, "_SubprocessScriptLauncher")


class SingleProcessLauncher(_SubprocessScriptLauncher):
    """Launches nothing, for a job of a single process; Lightning accepts it in a notebook."""

    is_interactive_compatible = True


@contextlib.contextmanager
def one_timeout(timeout: timedelta) -> Iterator[None]:
    """Gives one timeout to all process groups that are created inside the block.

    NeMo reads the timeout of the first process group from the variable of torch's NCCL heartbeat,
    which ends a process whose watchdog is slower than that. Megatron sets half an hour on all other
    groups. A later change has no effect in gloo.
    """
    minutes = timeout.total_seconds() / 60
    with (
        _with_options(torch.distributed, "init_process_group", timeout=timeout),
        _with_options(
            parallel_state, "initialize_model_parallel", distributed_timeout_minutes=minutes
        ),
    ):
        yield


@contextlib.contextmanager
def _with_options(module: Any, name: str, **options: Any) -> Iterator[None]:
    """Sets options of every call of a module's function inside the block."""
    function = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: function(*args, **(kwargs | options)))
    try:
        yield
    finally:
        setattr(module, name, function)
