"""Megatron and NeMo on a machine without a GPU.

Megatron-Core assumes CUDA all over: it asks for `torch.cuda.current_device()`, creates tensors on
`"cuda"`, compares tensor types with `"torch.cuda.FloatTensor"`, records events on streams. Nothing
in the mathematics needs it. The patches below give each of these a CPU meaning, so that NeMo's
MegatronStrategy and Megatron's schedule, gradient buffers, optimizer, random-number tracker and
distributed checkpoints run unchanged over gloo.

Each patch is one function with its reason; the two tuples at the end are the whole list. They
replace functions one by one rather than by a `TorchFunctionMode`, which intercepts every torch call
and costs a third of the training speed.
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
    """Whether a `device` argument names a GPU; a bare index does, `None` does not."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


def current_device_is_the_cpu() -> None:
    """Megatron creates its buffers on `torch.cuda.current_device()`."""
    replace(torch.cuda, "current_device", lambda: CPU)
    replace(torch.cuda, "set_device", lambda device: None)


def no_gpu_is_looked_for() -> None:
    """Torch's optimizers ask at every step whether there is CUDA, by opening NVIDIA's library."""
    replace(torch.cuda, "is_available", lambda: False)


def modules_stay_on_the_cpu() -> None:
    """`.cuda()` and `.to("cuda")` return what they are called on."""
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
    """`device="cuda"` in a factory means the CPU; page-locked memory needs a GPU driver."""

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
    """Megatron's mixed precision sorts parameters by `param.type()`, a string with 'cuda' in it."""
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
    """A stream or event of a machine on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = wait_stream = wait_event = _nothing


def streams_do_nothing() -> None:
    """Streams order work on a GPU; CPU work is ordered already."""
    stream = _NoStream()
    replace(torch.cuda, "Stream", _NoStream)
    replace(torch.cuda, "Event", _NoStream)
    replace(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    replace(torch.cuda, "current_stream", lambda device=None: stream)
    replace(torch.cuda, "default_stream", lambda device=None: stream)
    replace(torch.cuda, "synchronize", lambda device=None: None)
    replace(torch.cuda, "empty_cache", lambda: None)


def memory_figures_are_zero() -> None:
    """NeMo and Megatron report GPU memory; there is none."""
    for name in (
        *("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"),
        "reset_peak_memory_stats",
    ):
        replace(torch.cuda, name, lambda device=None: 0)


def random_state_is_the_cpus() -> None:
    """Megatron's tracker forks the CUDA generator for dropout and initial weights."""
    replace(torch.cuda, "manual_seed", torch.default_generator.manual_seed)
    replace(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
    replace(torch.cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))


def nccl_means_gloo() -> None:
    """Whoever names NCCL explicitly, as NeMo's and Megatron's options allow, gets gloo."""
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
    """Megatron compiles its fused functions, which on a CPU takes a C++ compiler and half a minute.

    It decorates them with `megatron.core.jit.jit_fuser`, that is `torch.compile`. A module put in
    its place before Megatron is imported leaves them as they are written.
    """
    jit = ModuleType("megatron.core.jit", doc="Stand-in: nothing is compiled on a CPU.")
    vars(jit)["jit_fuser"] = lambda function: function
    sys.modules[jit.__name__] = jit


def rng_tracker_uses_the_cpus_state() -> None:
    """Megatron's tracker reaches past the functions above for the generator of a CUDA device.

    It also warns, at every dropout, that the CPU's generator was used.
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
    """NeMo seeds Megatron's tracker only where it counts GPUs; attention needs it everywhere."""
    from megatron.core.parallel_state import get_pipeline_model_parallel_rank
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from nemo.lightning import megatron_init

    original = existing(megatron_init, "_set_random_seed")

    def set_random_seed(seed: int) -> None:
        original(seed)
        # As NeMo does it on a GPU: each pipeline stage has a seed of its own.
        model_parallel_cuda_manual_seed(seed + 100 * get_pipeline_model_parallel_rank())

    replace(megatron_init, "_set_random_seed", set_random_seed)


def loaded_tensors_stay() -> None:
    """NeMo moves what it loads to the current GPU, and asserts that there is one."""
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
    """Gives torch's CUDA functions their CPU meaning, once; before Megatron is imported."""
    for patch in TORCH_PATCHES:
        patch()


@functools.cache
def apply_to_frameworks() -> None:
    """Patches what Megatron and NeMo define themselves, once; imports them."""
    for patch in FRAMEWORK_PATCHES:
        patch()
