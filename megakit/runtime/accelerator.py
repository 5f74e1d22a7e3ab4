"""Chooses GPU or CPU, and makes the frameworks run on the chosen accelerator."""

import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megakit.errors import UserError
from megakit.runtime.deferred_imports import leave_out_compiler, unused_packages_deferred

if TYPE_CHECKING:
    import torch

AcceleratorName = Literal["auto", "cpu", "gpu"]

#: Multiplications of a matrix product that occupy a thread, by measurement. With less work, a
#: second thread occupies a core for more time than it saves.
WORK_OF_A_THREAD = 2**23


#: Parameters of `mallopt`, from glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


@dataclass(frozen=True)
class Accelerator:
    """The accelerator that a program runs on.

    Attributes:
        name: Lightning's name of the accelerator.
        device: Name of the processor or graphics card.
        count: Number of CPU cores or GPUs. Only a CPU may have more processes than its count.
        remark: Why `auto` did not choose an existing GPU, or None.
    """

    name: Literal["cpu", "gpu"]
    device: str
    count: int
    remark: str | None = None


def find_accelerator(requested: AcceleratorName = "auto", precision: str = "32") -> Accelerator:
    """Decides between GPU and CPU; `auto` is a GPU that computes in this precision, else the CPU.

    Raises:
        UserError: `gpu` was requested and no GPU can be used; the message states the reason.
    """
    if is_certainly_cpu(requested):
        return _cpu()
    found: Accelerator | str = "this machine has no NVIDIA GPU (or its driver is not loaded)."
    if _has_gpu_driver():
        found = _test_gpu("32" if precision == "32" else "bf16-mixed")
    if isinstance(found, Accelerator):
        return found
    if requested == "gpu":
        raise UserError(f"--accelerator gpu: {found} Use --accelerator cpu, or auto.")
    return _cpu(remark=f"The GPU is not used: {found}")


def is_certainly_cpu(requested: AcceleratorName) -> bool:
    """Returns whether `find_accelerator` would choose the CPU without testing a GPU."""
    return requested == "cpu" or (requested == "auto" and not _has_gpu_driver())


def own_gpu() -> int:
    """Returns the index of this process's GPU: 0 if srun shows each process only its own."""
    import torch

    return int(os.environ.get("LOCAL_RANK") or 0) % max(1, torch.cuda.device_count())


def devices_of_ranks(name: Literal["cpu", "gpu"], number: int) -> "list[torch.device]":
    """Returns the device of each rank of this machine, as this rank numbers the devices.

    A rank sees either all GPUs of the job or, for example with Slurm's `--gpus-per-task=1`, only
    its own GPU, which is then `cuda:0`.

    Args:
        name: The kind of device.
        number: The number of ranks of this machine.
    """
    import torch

    if name == "cpu":
        return [torch.device("cpu")] * number
    count = torch.cuda.device_count()
    return [torch.device("cuda", rank % count) for rank in range(number)]


def has_fast_bfloat16() -> bool:
    """Returns whether the CPU has instructions for bfloat16; without them, float32 is faster.

    torch calls bfloat16 supported also where oneDNN emulates it.
    """
    flags = {*_cpuinfo("flags").split(), *_cpuinfo("Features").split()}  # of x86, of Arm
    is_limited = "ONEDNN_MAX_CPU_ISA" in os.environ  # oneDNN then uses older instructions
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"}) and not is_limited


def use_accelerator(name: Literal["cpu", "gpu"], uses_nemo: bool = True) -> None:
    """Imports Megatron and NeMo, and patches them; call it before any other use of them.

    Args:
        name: The kind of device.
        uses_nemo: Whether the program uses NeMo; without effect where NeMo is not installed. A
            program that has passed False may call again with True.
    """
    _use(name, uses_nemo and importlib.util.find_spec("nemo") is not None)


@functools.cache
def _use(name: Literal["cpu", "gpu"], uses_nemo: bool) -> None:
    with warnings.catch_warnings(), unused_packages_deferred():
        warnings.simplefilter("ignore")
        from megakit.runtime import megatron_on_cpu

        with megatron_on_cpu.nothing_compiled() if name == "cpu" else contextlib.nullcontext():
            use_megatron(name)
        from megakit.runtime import (
            fused_adam,
            multi_tensor,
            optional_packages,
            safe_reading,
            single_rank,
            writer_threads,
        )

        if uses_nemo:
            optional_packages.replace_modules()
            optional_packages.patch_nemo()
            safe_reading.ignore_modelopt()
            if name == "cpu":
                megatron_on_cpu.patch_nemo()
        else:  # with NeMo, megakit's strategy and loop ask for these
            fused_adam.patch_optimizers()
            writer_threads.write_in_threads()
        single_rank.skip_collectives()
        multi_tensor.replace_loops()
        safe_reading.install_safe_readers()
    leave_out_compiler()


def use_megatron(name: Literal["cpu", "gpu"]) -> None:
    """Patches Megatron-Core, for programs without NeMo; call it before any other use of Megatron.

    `use_accelerator` makes these patches and those of NeMo, of saved time and of safe reading.

    Raises:
        ValueError: The name is not `cpu` or `gpu`.
    """
    run_megatron(name)
    from megakit.runtime import contiguous_sums

    contiguous_sums.mend_sums()


@functools.cache
def run_megatron(name: Literal["cpu", "gpu"]) -> None:
    """Makes the patches without which Megatron-Core does not run here; its results are its own."""
    if name not in ("cpu", "gpu"):
        raise ValueError(f"accelerator {name!r}: expected 'cpu' or 'gpu'; see find_accelerator()")
    from megakit.runtime import megatron_on_cpu, optional_packages

    if name == "cpu":
        megatron_on_cpu.patch_torch()
    optional_packages.replace_unified_memory()
    optional_packages.define_numpy_product()
    if name == "cpu":
        megatron_on_cpu.patch_rng_tracker_state()


def keep_freed_memory() -> None:
    """Lets the tensors of a step reuse the memory of the previous step, whichever thread freed it.

    By default glibc returns the memory of large tensors to the system, and allocates separate
    memory for each thread. The system then sets up every page again at every step.
    """
    for name, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, 1 << 30)):
        ctypes.CDLL(None).mallopt(name, value)


def use_full_float32() -> None:
    """Makes GPUs compute float32 with all 23 bits of the mantissa, and not in TF32 with 10 bits.

    TF32 is torch's default in convolutions, and that of NVIDIA's images in matrix products.
    """
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def destroy_parallel_state() -> None:
    """Destroys the process groups and global state of a job, so that another job can start."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    parallel_state.destroy_model_parallel()
    destroy_num_microbatches_calculator()
    get_cuda_rng_tracker().reset()
    if nemo := sys.modules.get("nemo.utils.app_state"):
        nemo.AppState().__init__()  # resets the singleton
    if dist.is_initialized():
        dist.destroy_process_group()


def limit_threads(work: int, processes: int = 1) -> None:
    """Sets `OMP_NUM_THREADS`, unless it is set; call it before torch is imported.

    Lightning overrides `torch.set_num_threads`.

    Args:
        work: Multiplications of a matrix product: tokens of a micro batch x width x width.
        processes: Processes that share this machine's cores.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    threads = min(work // WORK_OF_A_THREAD, len(os.sched_getaffinity(0)) // processes)
    os.environ["OMP_NUM_THREADS"] = str(max(1, threads))
    # By default, a waiting thread occupies its core. If another program uses the core, too, an
    # operation then takes up to a hundred times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _cpu(remark: str | None = None) -> Accelerator:
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    return Accelerator("cpu", name, len(os.sched_getaffinity(0)), remark)


def _cpuinfo(entry: str) -> str:
    """Returns an entry of the first CPU in /proc/cpuinfo, or an empty string."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith(entry)), "")


def _has_gpu_driver() -> bool:
    """Returns whether NVIDIA's or WSL's device file exists; otherwise torch is not imported."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


def _test_gpu(precision: str) -> Accelerator | str:
    """Returns this process's GPU; if it cannot compute, one sentence that states the reason."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same problem raises an error
            gpu = own_gpu()
            name = torch.cuda.get_device_name(gpu)
        dtype = torch.float32 if precision == "32" else torch.bfloat16
        square = torch.ones(16, 16, dtype=dtype, device=f"cuda:{gpu}")
        (square @ square).sum().item()
    except Exception as error:  # of several types, by what is wrong with the driver
        reason = (str(error) or repr(error)).partition("\n")[0].rstrip(".")
        return f"this machine's GPU cannot compute with {precision} ({reason})."
    return Accelerator("gpu", name, torch.cuda.device_count())
