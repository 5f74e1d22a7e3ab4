"""Each CPU patch: what it gives with all the others in place, and what breaks without it alone.

Patches change a process for good, so each case runs in a process of its own. Started as a script,
this file imports the stack once, forks a process for each case, and prints what came of them.
"""

import contextlib
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest


class Case(NamedTuple):
    patch: str
    stack: str  # "torch", or "nemo" where NeMo has to be imported
    code: Callable[[], Any]
    gives: Any
    without: str  # beginning of the error, or the other result


CASES: dict[str, Case] = {}


def case(patch: str, *, gives: Any, without: str, stack: str = "torch") -> Callable:
    def add(code: Callable[[], Any]) -> Callable[[], Any]:
        CASES[code.__name__] = Case(patch, stack, code, gives, without)
        return code

    return add


# --- Patches of torch -----------------------------------------------------------------------------


@case("patch_cuda_functions", gives="cpu", without="RuntimeError")
def a_buffer_on_the_current_device():
    import torch

    torch.cuda.set_device(0)
    return torch.ones(2, device=torch.cuda.current_device()).device.type


@case("patch_cuda_functions", gives=0, without=r"[1-9]")
def looks_for_a_gpu_in_three_steps():
    import torch

    asked = 0

    def none_there() -> int:
        nonlocal asked
        asked += 1
        return 0

    torch.cuda.device_count = torch._C._cuda_getDeviceCount = none_there
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()
    return asked


@case("patch_device_moves", gives=True, without="RuntimeError")
def a_module_to_cuda():
    import torch

    module = torch.nn.Linear(2, 2)
    return module.cuda(torch.cuda.current_device()) is module


@case("patch_device_moves", gives=[True, "cpu", "cpu", "torch.float64"], without="RuntimeError")
def a_tensor_to_cuda():
    import torch

    tensor = torch.ones(2)
    moved = [tensor.to("cuda", torch.float64), tensor.to(device=0)]
    return [tensor.cuda() is tensor, *(t.device.type for t in moved), str(moved[0].dtype)]


@case("patch_tensor_factories", gives=["cpu", "cpu", "cpu"], without="RuntimeError")
def tensors_made_on_cuda():
    import torch

    made = (
        torch.tensor([1], device="cuda"),
        torch.zeros(2, device=torch.device("cuda", 0)),
        torch.empty_like(torch.ones(2), device=0),
    )
    return [tensor.device.type for tensor in made]


@case("patch_tensor_factories", gives=[2, True], without="RuntimeError")
def page_locked_memory():
    import torch

    tensor = torch.empty(2, pin_memory=True)
    return [len(tensor), tensor.pin_memory() is tensor]


@case(
    "patch_tensor_type",
    gives=["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", "torch.int64"],
    without=r"\['torch.FloatTensor'",
)
def the_type_of_a_parameter():
    import torch

    tensor = torch.ones(2)
    as_integer = tensor.type("torch.cuda.LongTensor") if "cuda" in tensor.type() else tensor.long()
    return [tensor.type(), tensor.bfloat16().type(), str(as_integer.dtype)]


@case("patch_cuda_functions", gives=[1.0, True, 0.0], without="AcceleratorError|RuntimeError")
def streams_and_events():
    import torch

    event, stream = torch.cuda.Event(enable_timing=True), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = torch.ones(()).item()
        event.record()
    torch.cuda.default_stream().wait_event(event)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return [result, event.query(), event.elapsed_time(event)]


@case("patch_cuda_functions", gives=[0, 0, 0, 0], without="RuntimeError")
def memory_figures():
    import torch

    torch.cuda.reset_peak_memory_stats()
    return [
        getattr(torch.cuda, name)(torch.cuda.current_device())
        for name in (
            *("max_memory_allocated", "max_memory_reserved"),
            *("memory_allocated", "memory_reserved"),
        )
    ]


@case("patch_cuda_functions", gives=[True, True], without="RuntimeError")
def the_generator_of_the_gpu():
    import torch

    torch.cuda.manual_seed(1)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    again = torch.rand(3)
    torch.manual_seed(1)
    return [torch.equal(first, again), torch.equal(first, torch.rand(3))]


@case("replace_nccl_with_gloo", gives=["gloo", "gloo", 3.0], without="ValueError|RuntimeError")
def process_groups_with_nccl():
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    group = dist.new_group([0], backend="nccl")
    total = torch.tensor(3.0)
    dist.all_reduce(total, group=group)
    return [dist.get_backend(), dist.get_backend(group), total.item()]


@case("disable_jit_fuser", gives=[2.0, "function"], without="RuntimeError: compiles")
def a_fused_function_without_a_compiler():
    import torch

    from megakit.runtime import optional_packages

    os.environ["CXX"] = "no-such-compiler"
    optional_packages.replace_unified_memory()
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train as fused

    one = torch.ones(4, 8, requires_grad=True)
    try:
        return [fused((one, None), one, 0.0)[0, 0].item(), type(fused).__name__]
    except Exception as error:
        raise RuntimeError("compiles") from error


# --- Patches of Megatron and NeMo -----------------------------------------------------------------


def megatron() -> None:
    """Megatron's parallel state of a single process, as NeMo's strategy sets it up."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


@case("patch_rng_tracker_state", stack="nemo", gives=[True, True, []], without="Runtime")
def dropout_under_megatrons_tracker():
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.tensor_parallel import random as megatron_random

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(megatron_random.__name__).addHandler(handler)
    megatron()
    state = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(3)
    untouched = torch.equal(torch.get_rng_state(), state)
    with get_cuda_rng_tracker().fork():
        second = torch.rand(3)
    return [untouched, not torch.equal(first, second), warnings]


@case(
    "patch_rng_tracker_seed",
    stack="nemo",
    gives=[True, False, False],
    without="Exception: cuda rng state",
)
def dropout_after_nemo_has_seeded():
    """Which of a repetition, another seed and another pipeline stage draw the same."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from nemo.lightning import megatron_init

    megatron()
    get_cuda_rng_tracker().reset()
    drawn = []
    for seed, stage in ((7, 0), (7, 0), (8, 0), (7, 1)):
        parallel_state.set_pipeline_model_parallel_rank(stage)
        megatron_init._set_random_seed(seed)
        with get_cuda_rng_tracker().fork():
            drawn.append(torch.rand(3))
    return [torch.equal(drawn[0], other) for other in drawn[1:]]


@case("keep_loaded_tensors", stack="nemo", gives=["cpu", True], without="AssertionError")
def a_loaded_checkpoint():
    import torch
    from nemo.lightning.io import pl

    checkpoint = {"state_dict": {"weight": torch.ones(2)}}
    loaded = pl._fix_tensors_device(checkpoint)
    return [loaded["state_dict"]["weight"].device.type, loaded is checkpoint]


# --- Running the cases ----------------------------------------------------------------------------


def run_cases(stack: str) -> None:
    """Prints, for each case of a stack, what came of it with all patches and without its own."""
    from megakit.runtime import cpu, optional_packages

    patches = cpu.TORCH_PATCHES
    if stack == "nemo":
        cpu.patch_torch()
        optional_packages.install_stand_ins()
        patches = cpu.FRAMEWORK_PATCHES
    import torch  # noqa: F401  once, for all children

    results = {}
    for name, (patch, needs, code, *_) in CASES.items():
        if needs == stack:
            without = [other for other in patches if other.__name__ != patch]
            assert len(without) == len(patches) - 1, f"no such patch: {patch}"
            results[name] = [in_child(patches, code), in_child(without, code)]
    print(json.dumps(results))


def in_child(patches: Any, code: Callable[[], Any]) -> Any:
    """What a function returns, or its error as a string, in a forked process with these patches."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        with contextlib.suppress(BaseException), os.fdopen(writer, "w") as answer:
            try:
                for patch in patches:
                    patch()
                told = code()
            except Exception as error:
                traceback.print_exc()
                told = f"{type(error).__name__}: {error}"
            answer.write(json.dumps(told))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        told = json.load(answer)
    os.wait()
    return told


if __name__ == "__main__":
    run_cases(sys.argv[1])


@cache
def results_of(stack: str) -> dict[str, list[Any]]:
    from tests.scripts import run_python  # the started script has another `tests`

    job = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    child = run_python(__file__, stack, timeout=180, **job)
    results: dict[str, list[Any]] = json.loads(child.output().splitlines()[-1])
    return results


@pytest.mark.parametrize("name", CASES)
def test_patch(name: str) -> None:
    expected = CASES[name]
    with_all, without_it = results_of(expected.stack)[name]
    assert with_all == expected.gives
    assert re.match(expected.without, str(without_it)), without_it


def test_every_patch_has_a_case() -> None:
    from megakit.runtime import cpu

    patches = {patch.__name__ for patch in (*cpu.TORCH_PATCHES, *cpu.FRAMEWORK_PATCHES)}
    assert patches == {case.patch for case in CASES.values()}
