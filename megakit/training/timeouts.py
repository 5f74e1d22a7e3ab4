"""Sets how long a rank waits for another rank, in all process groups of NeMo and Megatron."""

import contextlib
import functools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state

from megakit.errors import reason_of
from megakit.runtime.patching import patch, require_attribute

#: Options of the functions that create process groups, inside a block of `one_timeout`.
_OPTIONS: dict[str, dict[str, Any]] = {}


@contextlib.contextmanager
def one_timeout(timeout: timedelta) -> Iterator[None]:
    """Sets one timeout on all process groups that are created inside the block.

    NeMo reads the timeout of the first process group from the variable of torch's NCCL heartbeat,
    which ends a process whose watchdog is slower than that. Megatron sets half an hour on all other
    groups. A later change has no effect in gloo.
    """
    replace_timeouts()
    _OPTIONS["init_process_group"] = {"timeout": timeout}
    minutes = timeout.total_seconds() / 60
    _OPTIONS["initialize_model_parallel"] = {"distributed_timeout_minutes": minutes}
    try:
        yield
    finally:
        _OPTIONS.clear()


@functools.cache
def replace_timeouts() -> None:
    """Makes two functions take the options of `one_timeout`, once."""
    for owner, name in (
        (torch.distributed, "init_process_group"),
        (parallel_state, "initialize_model_parallel"),
    ):
        original = require_attribute(owner, name)

        def create(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            try:
                return original(*args, **(options | _OPTIONS.get(name, {})))
            except torch.distributed.DistStoreError as error:
                raise TimeoutError(
                    "the ranks could not connect to each other within --timeout, because one of "
                    f"them hangs or has ended ({reason_of(error)})"
                ) from error

        patch(
            owner,
            name,
            functools.wraps(original)(create),
            group="safe",
            reason="NeMo ignores the strategy's `timeout`, and Megatron waits for half an hour",
            when="while `ExactStrategy` creates its process groups",
        )
