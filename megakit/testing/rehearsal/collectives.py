"""Simulates NCCL with gloo: an NCCL group accepts only tensors of GPUs."""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megakit.testing.rehearsal.machine import Machine
from megakit.testing.rehearsal.replacements import Replacements


def replace_nccl(replaced: Replacements, machine: Machine) -> None:
    """Replaces the functions that create process groups or return their backend."""
    names = machine.nccl_groups

    def is_nccl(group: Any) -> bool:
        group = distributed_c10d._get_default_group() if group is None else group
        return getattr(group, "group_name", None) in names

    def on_gloo(original: Callable[..., Any], position: int) -> Callable[..., Any]:
        """Wraps `init_process_group` or `new_group`, whose backend is at a position."""

        @functools.wraps(original)
        def create(*args: Any, **kwargs: Any) -> Any:
            arguments = list(args)
            given = arguments[position:] or [kwargs.get("backend")]
            if position and given[0] is None:
                asked = "nccl" if is_nccl(None) else "gloo"  # as the default group
            else:
                asked = given[0] or "nccl"
            if len(arguments) > position:
                arguments[position] = "gloo"
            else:
                kwargs["backend"] = "gloo"
            for option in ("device_id", "pg_options"):
                kwargs.pop(option, None)
            group = original(*arguments, **kwargs)
            group = group or distributed_c10d._get_default_group()
            if "nccl" in asked and isinstance(group, dist.ProcessGroup):
                names.add(group.group_name)
            return group if position else None

        return create

    get_backend, get_device = dist.get_backend, distributed_c10d._get_object_coll_device
    barrier = distributed_c10d.barrier

    def barrier_(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)  # gloo refuses device_ids

    functions: dict[str, Any] = {
        "init_process_group": on_gloo(dist.init_process_group, 0),
        "new_group": on_gloo(dist.new_group, 2),
        "get_backend": lambda group=None: "nccl" if is_nccl(group) else get_backend(group),
        "barrier": barrier_,
    }
    for module in (dist, distributed_c10d):
        replaced.set(module, **functions)

    def object_device(group: Any = None) -> Any:
        return f"cuda:{machine.thread.current}" if is_nccl(group) else get_device(group)

    replaced.set(distributed_c10d, _get_object_coll_device=object_device)
