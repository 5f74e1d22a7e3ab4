"""Patches Megatron and NeMo for a machine without a GPU.

Megatron-Core assumes CUDA in many places: it calls `torch.cuda.current_device()`, creates tensors
on `"cuda"`, compares tensor types with `"torch.cuda.FloatTensor"`, and records events on streams.
The mathematics does not need CUDA. The patches below make these calls work on a CPU. NeMo's
`MegatronStrategy` and Megatron's schedule, gradient buffers, optimizer, random-number tracker and
distributed checkpoints then run unchanged over gloo.

Patches of torch come before the import of Megatron. A `TorchFunctionMode` instead of the patches
would make training a third slower.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megakit.runtime.patching import patch, record, require_attribute, stand_in

CPU = torch.device("cpu")
WHEN = "without a GPU"
_patch = functools.partial(patch, group="needed", when=WHEN)


def _is_gpu(device: Any) -> bool:
    """Returns whether a `device` argument names a GPU; an integer does, `None` does not."""
    is_named = isinstance(device, str | torch.device)
    return isinstance(device, int) or (is_named and str(device).startswith("cuda"))


class _NoStream:
    """A stand-in for a CUDA stream or event: CPU work has finished when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = wait_stream = wait_event = __init__


def patch_cuda_functions() -> None:
    """Replaces functions of `torch.cuda`, which would need a GPU."""

    def replace(reason: str, functions: dict[str, Any]) -> None:
        for name, function in functions.items():
            _patch(torch.cuda, name, function, reason=reason)

    replace("Megatron creates its buffers there", {"current_device": lambda: CPU})
    replace(
        "torch's optimizers call it in each step, and it opens NVIDIA's library",
        {"is_available": lambda: False},
    )
    # A function of its own for each name: torch._dynamo, which megatron-core 0.19 imports, refuses
    # one function under two names.
    orders = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")
    replace("a CPU has nothing to do here", {name: lambda device=None: None for name in orders})
    memory = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    replace(
        "NeMo and Megatron report a GPU's memory", {name: lambda device=None: 0 for name in memory}
    )
    replace(
        "streams order the work of a GPU; a CPU works in order",
        {
            **dict.fromkeys(("Stream", "Event"), _NoStream),
            "current_stream": lambda device=None: _NoStream(),
            "default_stream": lambda device=None: _NoStream(),
            "stream": lambda stream: contextlib.nullcontext(),
        },
    )
    replace(
        "Megatron's tracker forks the CUDA generator for dropout and first weights",
        {
            "manual_seed": torch.default_generator.manual_seed,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        },
    )


def patch_device_moves() -> None:
    """Makes `.cuda()` and `.to("cuda")` leave modules and tensors on the CPU."""
    reason = "Megatron and NeMo move tensors and modules to `cuda`"
    _patch(torch.nn.Module, "cuda", lambda self, device=None: self, reason=reason)
    _patch(torch.Tensor, "cuda", lambda self, *args, **kwargs: self, reason=reason)
    to = torch.Tensor.to

    @functools.wraps(to)
    def tensor_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and _is_gpu(args[0]):
            args = (CPU, *args[1:])
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(self, *args, **kwargs)

    _patch(torch.Tensor, "to", tensor_to, reason=reason)


def patch_tensor_factories() -> None:
    """Makes tensor factories create CPU tensors for `device="cuda"`, without page-locked memory."""
    for name in (
        *("arange", "as_tensor", "empty", "empty_like", "full", "full_like", "ones", "ones_like"),
        *("rand", "randint", "randn", "tensor", "zeros", "zeros_like"),
    ):
        factory = getattr(torch, name)

        def create(*args: Any, factory: Callable = factory, **kwargs: Any) -> Any:
            if _is_gpu(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        reason = 'Megatron creates tensors with `device="cuda"`'
        _patch(torch, name, functools.wraps(factory)(create), reason=reason)
    reason = "page-locked memory needs NVIDIA's driver"
    _patch(torch.Tensor, "pin_memory", lambda self, device=None: self, reason=reason)


def patch_tensor_type() -> None:
    """Makes `Tensor.type()` return names of CUDA types."""
    tensor_type = torch.Tensor.type

    @functools.wraps(tensor_type)
    def cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return tensor_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return tensor_type(self, dtype, *args, **kwargs)

    reason = "Megatron's mixed precision expects `cuda` in the name of a weight's type"
    _patch(torch.Tensor, "type", cuda_type, reason=reason)


def replace_nccl_with_gloo() -> None:
    """Replaces the backend NCCL with gloo."""
    for name in ("init_process_group", "new_group"):
        original = getattr(torch.distributed, name)

        def on_gloo(*args: Any, original: Callable = original, **kwargs: Any) -> Any:
            if args and args[0] == "nccl":
                args = ("gloo", *args[1:])
            if kwargs.get("backend") == "nccl":
                kwargs["backend"] = "gloo"
            return original(*args, **kwargs)

        reason = "options of NeMo and Megatron name NCCL; the replacement uses gloo"
        _patch(torch.distributed, name, functools.wraps(original)(on_gloo), reason=reason)


class _Works(list[Any]):
    """Collectives that are waited for together."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def split_coalesced_gathers() -> None:
    """Gathers tensor by tensor where several are to be gathered in one collective.

    After each collective, one of the two workers of a gloo group notes the collective's name in a
    string of the group, without a lock. If both note `ALLGATHER_COALESCED`, which is too long to be
    stored in place, they may free the same memory: of trainings with `overlap_param_gather`, one in
    300 aborted.
    """

    def gather(self: Any, outputs: list[Any], inputs: list[Any], *options: Any) -> _Works:
        return _Works(map(self._allgather_base, outputs, inputs))

    reason = "two gathers in flight may free the same memory"
    name = "allgather_into_tensor_coalesced"
    _patch(torch.distributed.ProcessGroup, name, gather, group="safe", reason=reason)


def disable_jit_fuser() -> None:
    """Leaves Megatron's fused functions uncompiled, by a stand-in for Megatron's module."""
    stand_in(
        "megatron.core.jit",
        {"jit_fuser": lambda function: function},
        group="needed",
        reason="to compile Megatron's fused functions takes a C++ compiler and half a minute",
        when=WHEN,
    )


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Leaves functions uncompiled that are marked for `torch.compile` in the `with` block."""
    original = torch.compile

    def leave(function: Any = None, **options: Any) -> Any:
        is_left = record(
            "torch",
            "compile",
            group="fast",
            reason="megatron-core 0.19 imports torch's compiler for a function of its inference",
            worth="9 s of a start",
            when=WHEN,
        )
        return function or leave if is_left else original(function, **options)

    torch.compile = leave  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original


def patch_rng_tracker_state() -> None:
    """Makes Megatron's tracker read and set the CPU generator instead of that of a CUDA device.

    Its warning at every dropout, that the CPU generator's state has changed, is filtered out.
    """
    from megatron.core.tensor_parallel import random as megatron_random

    for name, function in {
        "_set_cuda_rng_state": lambda new_state, *args, **kwargs: torch.set_rng_state(new_state),
        "_get_cuda_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    }.items():
        reason = "the tracker uses the generator of a CUDA device"
        _patch(megatron_random, name, function, reason=reason)
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: not record.getMessage().startswith("CPU RNG state changed")
    )


def patch_nemo() -> None:
    """Lets NeMo seed Megatron's tracker, which attention needs, and leave tensors on the CPU."""
    from megatron.core.parallel_state import get_pipeline_model_parallel_rank
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from nemo.lightning import megatron_init
    from nemo.lightning.io import pl

    original = require_attribute(megatron_init, "_set_random_seed")

    def set_random_seed(seed: int) -> None:
        original(seed)
        # As NeMo does on GPUs: each pipeline stage has its own seed.
        model_parallel_cuda_manual_seed(seed + 100 * get_pipeline_model_parallel_rank())

    reason = "NeMo seeds the tracker, which attention needs, only if there are GPUs"
    _patch(megatron_init, "_set_random_seed", set_random_seed, reason=reason)
    reason = "NeMo moves loaded tensors to the current GPU"
    _patch(pl, "_fix_tensors_device", lambda checkpoint: checkpoint, reason=reason)


@functools.cache
def patch_torch() -> None:
    """Applies the patches of torch once; call it before Megatron is imported."""
    patch_cuda_functions()
    patch_device_moves()
    patch_tensor_factories()
    patch_tensor_type()
    replace_nccl_with_gloo()
    split_coalesced_gathers()
    disable_jit_fuser()
