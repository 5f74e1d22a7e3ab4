"""Replaces the functions of `torch.cuda` by functions of the simulated machine."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megakit.testing.rehearsal.machine import Machine
from megakit.testing.rehearsal.replacements import Replacements


class Properties:
    """What `get_device_properties` returns."""

    name, major, minor = "rehearsed GPU", 9, 0
    total_memory, multi_processor_count = 80 << 30, 132


def replace_devices(replaced: Replacements, machine: Machine) -> None:
    """Replaces the functions that query the GPUs, or query or set the current GPU."""
    cuda = torch.cuda

    def set_device(device: Any) -> None:
        index = machine.index_of(device)
        if index is not None and index >= 0:
            machine.thread.current = index
            machine.open(index)

    def current_device() -> int:
        machine.initialize()
        return machine.thread.current

    @contextlib.contextmanager
    def device(device: Any) -> Iterator[None]:
        before, index = machine.thread.current, machine.index_of(device)
        machine.thread.current = before if index is None else index
        try:
            yield
        finally:
            machine.thread.current = before

    replaced.set(
        cuda,
        _lazy_init=machine.initialize,
        init=machine.initialize,
        is_available=lambda: bool(machine.gpus),
        is_initialized=lambda: machine.is_initialized,
        _is_in_bad_fork=lambda: machine.is_in_bad_fork,
        device_count=lambda: len(machine.gpus),
        current_device=current_device,
        set_device=set_device,
        device=device,
        get_device_name=lambda device=None: Properties.name,
        get_device_capability=lambda device=None: (Properties.major, Properties.minor),
        get_device_properties=lambda device=None: Properties,
        is_bf16_supported=lambda including_emulation=True: True,
    )
    has_gpu = bool(machine.gpus)
    replaced.set(
        torch.accelerator,
        is_available=lambda: has_gpu,
        current_accelerator=lambda check_available=False: torch.device("cuda") if has_gpu else None,
        device_count=lambda: len(machine.gpus),
        current_device_index=current_device,
        set_device_index=set_device,
    )


def replace_streams(replaced: Replacements, machine: Machine) -> None:
    """Replaces streams and events; work on the CPU has finished when a call returns."""

    class Stream:
        cuda_stream = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def __enter__(self) -> "Stream":
            return self

        def __exit__(self, *exception: object) -> None: ...

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: object) -> float:
            return 0.0

        def _go_on(self, *args: Any, **kwargs: Any) -> "Stream":
            return self

        record = wait = wait_stream = wait_event = record_event = _go_on

        def synchronize(self) -> None:
            machine.counts.add("synchronizations", "Stream.synchronize")

    stream = Stream()
    replaced.set(
        torch.cuda,
        **dict.fromkeys(("Stream", "Event"), Stream),
        **dict.fromkeys(("current_stream", "default_stream"), lambda device=None: stream),
        stream=lambda stream: contextlib.nullcontext(),
        set_stream=lambda stream: None,
        synchronize=lambda device=None: machine.counts.add("synchronizations", "cuda.synchronize"),
        is_current_stream_capturing=lambda: False,
    )
    replaced.set(torch.Tensor, record_stream=lambda self, stream: None)


def replace_memory(replaced: Replacements, machine: Machine) -> None:
    """Replaces memory statistics by constants."""
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    replaced.set(
        torch.cuda,
        **dict.fromkeys(names, lambda device=None: 0),
        **dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), lambda device=None: None),
        mem_get_info=lambda device=None: (Properties.total_memory, Properties.total_memory),
        memory_stats=lambda device=None: defaultdict(int),
    )
    replaced.set(torch._C, _cuda_clearCublasWorkspaces=lambda: None)


def replace_random(replaced: Replacements, machine: Machine) -> None:
    """Replaces the functions of the GPUs' default generators."""
    generators = machine.generators

    def of(device: Any) -> torch.Generator:
        index = machine.index_of("cuda" if device in (None, -1) else device)
        assert index is not None
        return generators[index]

    def seed_current(seed: int) -> None:
        if generators:
            generators[machine.thread.current].manual_seed(int(seed))

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(int(seed))

    def set_all(states: list[torch.Tensor]) -> None:
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)

    functions: dict[str, Any] = {
        "manual_seed": seed_current,
        "manual_seed_all": seed_all,
        "get_rng_state": lambda device="cuda": of(device).get_state(),
        "set_rng_state": lambda state, device="cuda": of(device).set_state(state.cpu()),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": set_all,
        "initial_seed": lambda: generators[machine.thread.current].initial_seed(),
    }
    for module in (torch.cuda, torch.cuda.random):
        replaced.set(module, **functions)
    replaced.set(torch.cuda, default_generators=generators)


def replace_compiler(replaced: Replacements, machine: Machine) -> None:
    """Disables `torch.compile`, because Triton's kernels cannot run on CPU memory."""

    def compile_(model: Any = None, **kwargs: Any) -> Any:
        return (lambda function: function) if model is None else model

    replaced.set(torch, compile=compile_)


CUDA: tuple[Callable[[Replacements, Machine], None], ...] = (
    replace_devices,
    replace_streams,
    replace_memory,
    replace_random,
    replace_compiler,
)
