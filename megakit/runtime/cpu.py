"""Patches Megatron and NeMo for a machine without a GPU.

Megatron-Core assumes CUDA in many places: it calls `torch.cuda.current_device()`, creates tensors
on `"cuda"`, compares tensor types with `"torch.cuda.FloatTensor"`, and records events on streams.
The mathematics does not need CUDA. The patches below make these calls work on a CPU. NeMo's
`MegatronStrategy` and Megatron's schedule, gradient buffers, optimizer, random-number tracker and
distributed checkpoints then run unchanged over gloo.

Each patch is one function, whose docstring states the reason; the two tuples at the end list all
patches. Each patch replaces single functions. A `TorchFunctionMode` would intercept every torch
call, and would cost a third of the training speed.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megakit.runtime.patching import existing, replace

CPU = torch.device("cpu")


def _means_cuda(device: Any) -> bool:
    """Returns whether a `device` argument names a GPU; an integer does, `None` does not."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


def current_device_is_the_cpu() -> None:
    """Makes `torch.cuda.current_device()` return the CPU; Megatron creates its buffers there."""
    replace(torch.cuda, "current_device", lambda: CPU)
    replace(torch.cuda, "set_device", lambda device: None)


def no_gpu_is_looked_for() -> None:
    """Makes `torch.cuda.is_available()` return False at once.

    Torch's optimizers call it at every step, and the original function opens NVIDIA's library.
    """
    replace(torch.cuda, "is_available", lambda: False)


def modules_stay_on_the_cpu() -> None:
    """Makes `.cuda()` and `.to("cuda")` leave modules and tensors on the CPU."""
    replace(torch.nn.Module, "cuda", lambda self, device=None: self)
    replace(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    to = torch.Tensor.to

    @functools.wraps(to)
    def tensor_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and _means_cuda(args[0]):
            args = (CPU, *args[1:])
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(self, *args, **kwargs)

    replace(torch.Tensor, "to", tensor_to)


def factories_make_cpu_tensors() -> None:
    """Makes tensor factories create CPU tensors for `device="cuda"`.

    The argument `pin_memory` is ignored, since page-locked memory needs a GPU driver.
    """

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if _means_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    for name in (
        *("arange", "as_tensor", "empty", "empty_like", "full", "full_like", "ones", "ones_like"),
        *("rand", "randint", "randn", "tensor", "zeros", "zeros_like"),
    ):
        replace(torch, name, on_cpu(getattr(torch, name)))
    replace(torch.Tensor, "pin_memory", lambda self, device=None: self)


def tensor_types_answer_as_on_a_gpu() -> None:
    """Makes `Tensor.type()` return names of CUDA types.

    Megatron's mixed precision sorts parameters by `param.type()`, and expects 'cuda' in it.
    """
    tensor_type = torch.Tensor.type

    @functools.wraps(tensor_type)
    def answer(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return tensor_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return tensor_type(self, dtype, *args, **kwargs)

    replace(torch.Tensor, "type", answer)


class _NoStream:
    """A stand-in for a CUDA stream or event: CPU work has finished when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = wait_stream = wait_event = _nothing


def streams_do_nothing() -> None:
    """Replaces CUDA streams, which order work on a GPU; CPU work runs in order anyway."""
    stream = _NoStream()
    replace(torch.cuda, "Stream", _NoStream)
    replace(torch.cuda, "Event", _NoStream)
    replace(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    replace(torch.cuda, "current_stream", lambda device=None: stream)
    replace(torch.cuda, "default_stream", lambda device=None: stream)
    replace(torch.cuda, "synchronize", lambda device=None: None)
    replace(torch.cuda, "empty_cache", lambda: None)


def memory_figures_are_zero() -> None:
    """Makes torch report 0 bytes of GPU memory to NeMo and Megatron, which report the figures."""
    for name in (
        *("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"),
        "reset_peak_memory_stats",
    ):
        replace(torch.cuda, name, lambda device=None: 0)


def random_state_is_the_cpus() -> None:
    """Makes the functions for the CUDA generator's state use the CPU generator.

    Megatron's tracker forks the CUDA generator for dropout and initial weights.
    """
    replace(torch.cuda, "manual_seed", torch.default_generator.manual_seed)
    replace(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
    replace(torch.cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))


def nccl_means_gloo() -> None:
    """Replaces the backend NCCL with gloo, since options of NeMo and Megatron may name NCCL."""
    for name in ("init_process_group", "new_group"):
        original = getattr(torch.distributed, name)

        def on_gloo(*args: Any, original: Callable = original, **kwargs: Any) -> Any:
            if args and args[0] == "nccl":
                args = ("gloo", *args[1:])
            if kwargs.get("backend") == "nccl":
                kwargs["backend"] = "gloo"
            return original(*args, **kwargs)

        replace(torch.distributed, name, functools.wraps(original)(on_gloo))


def fused_functions_run_as_written() -> None:
    """Leaves Megatron's fused functions uncompiled.

    On a CPU, compiling needs a C++ compiler and half a minute. Megatron decorates its fused
    functions with `megatron.core.jit.jit_fuser`, which is `torch.compile`. A stand-in for this
    module, installed before Megatron is imported, returns the functions unchanged.
    """
    jit = ModuleType("megatron.core.jit", doc="Stand-in: nothing is compiled on a CPU.")
    vars(jit)["jit_fuser"] = lambda function: function
    sys.modules[jit.__name__] = jit


def rng_tracker_uses_the_cpus_state() -> None:
    """Makes Megatron's tracker read and set the state of the CPU generator.

    The tracker does not use the functions that `random_state_is_the_cpus` replaces; it accesses the
    generator of a CUDA device. Its warning at every dropout, that the CPU generator's state has
    changed, is filtered out.
    """
    from megatron.core.tensor_parallel import random as megatron_random

    replace(
        megatron_random,
        "_set_cuda_rng_state",
        lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
    )
    replace(
        megatron_random,
        "_get_cuda_rng_state",
        lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
    )
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: not record.getMessage().startswith("CPU RNG state changed")
    )


def rng_tracker_is_seeded() -> None:
    """Seeds Megatron's tracker, which attention needs; NeMo seeds it only if there are GPUs."""
    from megatron.core.parallel_state import get_pipeline_model_parallel_rank
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from nemo.lightning import megatron_init

    original = existing(megatron_init, "_set_random_seed")

    def set_random_seed(seed: int) -> None:
        original(seed)
        # As NeMo does on GPUs: each pipeline stage has its own seed.
        model_parallel_cuda_manual_seed(seed + 100 * get_pipeline_model_parallel_rank())

    replace(megatron_init, "_set_random_seed", set_random_seed)


def loaded_tensors_stay() -> None:
    """Leaves loaded tensors on the CPU.

    NeMo asserts that there is a GPU, and moves loaded tensors to the current GPU.
    """
    from nemo.lightning.io import pl

    replace(pl, "_fix_tensors_device", lambda checkpoint: checkpoint)


TORCH_PATCHES: tuple[Callable[[], None], ...] = (
    current_device_is_the_cpu,
    no_gpu_is_looked_for,
    modules_stay_on_the_cpu,
    factories_make_cpu_tensors,
    tensor_types_answer_as_on_a_gpu,
    streams_do_nothing,
    memory_figures_are_zero,
    random_state_is_the_cpus,
    nccl_means_gloo,
    fused_functions_run_as_written,
)
FRAMEWORK_PATCHES: tuple[Callable[[], None], ...] = (
    rng_tracker_uses_the_cpus_state,
    rng_tracker_is_seeded,
    loaded_tensors_stay,
)


@functools.cache
def apply() -> None:
    """Applies the patches of torch once; call it before Megatron is imported."""
    for patch in TORCH_PATCHES:
        patch()


@functools.cache
def apply_to_frameworks() -> None:
    """Imports Megatron and NeMo, and applies their patches once."""
    for patch in FRAMEWORK_PATCHES:
        patch()
