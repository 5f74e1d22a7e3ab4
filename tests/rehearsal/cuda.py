"""Replaces the functions of `torch.cuda` and of process groups by those of the simulated machine.

Functions are not compiled, because Triton's kernels cannot run on the memory of a CPU.
"""

import contextlib
import functools
import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .graphs import replace_graphs
from .machine import Machine, replace


class Properties:
    name, major, minor = "rehearsed GPU", 9, 0
    total_memory, multi_processor_count = 80 << 30, 132


def replace_devices(machine: Machine) -> None:
    """Replaces the functions that query the GPUs, or query or set the current GPU."""
    thread = machine.thread

    def set_device(device: Any) -> None:
        index = machine.index_of(device)
        if index is not None and index >= 0:
            thread.current = index
            machine.open(index)

    def current_device() -> int:
        machine.initialize()
        return thread.current

    @contextlib.contextmanager
    def device(device: Any) -> Iterator[None]:
        before, index = thread.current, machine.index_of(device)
        thread.current = before if index is None else index
        try:
            yield
        finally:
            thread.current = before

    both: dict[str, Any] = {
        "is_available": lambda: bool(machine.gpus),
        "device_count": lambda: len(machine.gpus),
    }
    replace(
        torch.cuda,
        **both,
        **dict.fromkeys(("_lazy_init", "init"), machine.initialize),
        is_initialized=lambda: machine.owner == os.getpid(),
        _is_in_bad_fork=lambda: machine.owner not in (None, os.getpid()),
        current_device=current_device,
        set_device=set_device,
        device=device,
        get_device_name=lambda device=None: Properties.name,
        get_device_capability=lambda device=None: (Properties.major, Properties.minor),
        get_device_properties=lambda device=None: Properties,
        is_bf16_supported=lambda including_emulation=True: True,
    )
    found = torch.device("cuda") if machine.gpus else None
    replace(
        torch.accelerator,
        **both,
        current_accelerator=lambda check_available=False: found,
        current_device_index=current_device,
        set_device_index=set_device,
    )


def replace_streams(machine: Machine) -> None:
    """Replaces streams and events; work on the CPU has finished when a call returns."""
    thread = machine.thread

    class Stream(contextlib.nullcontext[None]):
        cuda_stream = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

        def _go_on(self, *args: Any, **kwargs: Any) -> "Stream":
            return self

        record = wait = wait_stream = wait_event = record_event = _go_on
        query = elapsed_time = lambda self, other=None: True
        synchronize = machine.wait

    class Current:
        def __init__(self, stream: Stream | None) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before = thread.stream
            set_stream(self.stream)

        def __exit__(self, *error: object) -> None:
            thread.stream = self.before

    def set_stream(stream: Stream | None) -> None:
        if stream is not None:
            thread.stream = None if stream is default else stream

    default = Stream()
    replace(
        torch.cuda,
        **dict.fromkeys(("Stream", "Event"), Stream),
        default_stream=lambda device=None: default,
        current_stream=lambda device=None: thread.stream or default,
        stream=Current,
        set_stream=set_stream,
        synchronize=machine.wait,
        make_graphed_callables=lambda module, samples: module,
    )
    replace(torch.Tensor, record_stream=lambda self, stream: None)


def replace_memory() -> None:
    """Replaces memory statistics by constants."""
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    replace(
        torch.cuda,
        **dict.fromkeys(names, lambda device=None: 0),
        **dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), lambda device=None: None),
        mem_get_info=lambda device=None: (Properties.total_memory, Properties.total_memory),
        memory_stats=lambda device=None: defaultdict(int),
    )
    caches = ("_cuda_clearCublasWorkspaces", "_host_emptyCache")
    replace(torch._C, **dict.fromkeys(caches, lambda: None))


def replace_random(machine: Machine) -> None:
    """Replaces the functions of the GPUs' default generators."""
    generators = machine.generators

    def of(device: Any) -> Any:
        index = machine.index_of("cuda" if device in (None, -1) else device)
        assert index is not None
        return generators[index]

    def seed(seed: int, seeded: slice) -> None:
        for generator in generators[seeded]:
            generator.manual_seed(int(seed))

    def current() -> int:
        return machine.thread.current

    def set_all(states: list[torch.Tensor]) -> None:
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)

    functions: dict[str, Any] = {
        "manual_seed": lambda number: seed(number, slice(current(), current() + 1)),
        "manual_seed_all": lambda number: seed(number, slice(None)),
        "get_rng_state": lambda device="cuda": of(device).get_state(),
        "set_rng_state": lambda state, device="cuda": of(device).set_state(state.cpu()),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": set_all,
        "initial_seed": lambda: generators[current()].initial_seed(),
    }
    for module in (torch.cuda, torch.cuda.random):
        replace(module, **functions)
    replace(torch.cuda, default_generators=generators)


def replace_nccl(machine: Machine) -> None:
    """Makes a group of NCCL one of gloo that accepts only tensors of GPUs."""
    names = machine.nccl_groups

    def is_nccl(group: Any) -> bool:
        group = distributed_c10d._get_default_group() if group is None else group
        return getattr(group, "group_name", None) in names

    def on_gloo(original: Callable[..., Any], is_new: bool) -> Callable[..., Any]:
        """Wraps `init_process_group`, or `new_group`, whose default is the default group's."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def create(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            asked = given.get("backend") or ("gloo" if is_new and not is_nccl(None) else "nccl")
            given["backend"] = "gloo"
            for option in ("device_id", "pg_options"):
                given.pop(option, None)
            group = original(**given) or distributed_c10d._get_default_group()
            if "nccl" in asked and isinstance(group, dist.ProcessGroup):
                names.add(group.group_name)
            return group if is_new else None

        return create

    get_backend, get_device = dist.get_backend, distributed_c10d._get_object_coll_device
    barrier = distributed_c10d.barrier
    functions: dict[str, Any] = {
        "init_process_group": on_gloo(dist.init_process_group, is_new=False),
        "new_group": on_gloo(dist.new_group, is_new=True),
        "get_backend": lambda group=None: "nccl" if is_nccl(group) else get_backend(group),
        # gloo refuses device_ids
        "barrier": lambda group=None, async_op=False, device_ids=None: barrier(group, async_op),
    }
    for module in (dist, distributed_c10d):
        replace(module, **functions)

    def object_device(group: Any = None) -> Any:
        return f"cuda:{machine.thread.current}" if is_nccl(group) else get_device(group)

    replace(distributed_c10d, _get_object_coll_device=object_device)


def install_cuda(machine: Machine) -> None:
    """Makes all of these replacements, for the rest of the process."""
    parts = (replace_devices, replace_streams, replace_random, replace_nccl, replace_graphs)
    for install in parts:
        install(machine)
    replace_memory()
    replace(torch, compile=lambda model=None, **_: (lambda f: f) if model is None else model)
