"""Chooses GPU or CPU, and makes the frameworks run on the chosen accelerator."""

import os
import platform
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megakit.errors import UserError

AcceleratorName = Literal["auto", "cpu", "gpu"]


@dataclass(frozen=True)
class Accelerator:
    """The accelerator that a program runs on.

    Attributes:
        name: Lightning's name of the accelerator, `"cpu"` or `"gpu"`.
        device: Name of the processor or graphics card.
        count: Number of CPU cores or GPUs. A job may have more processes than cores, but not more
            processes than GPUs.
        remark: Why `auto` did not choose an existing GPU, or None.
    """

    name: Literal["cpu", "gpu"]
    device: str
    count: int
    remark: str | None = None


def find_accelerator(requested: AcceleratorName = "auto", precision: str = "32") -> Accelerator:
    """Decides between GPU and CPU without changing anything.

    Args:
        requested: `auto` chooses a GPU that works at this precision, else the CPU.
        precision: `bf16-mixed` or `32`, which a GPU has to support; `auto` is `bf16-mixed` there.

    Raises:
        UserError: `gpu` was requested and no GPU can be used; the message states the reason.
    """
    if is_certainly_cpu(requested):
        return _cpu()
    if not _has_gpu_driver():
        problem: str | None = "this machine has no NVIDIA GPU (or its driver is not loaded)."
    else:
        problem = _why_unusable(precision)
    if problem is None:
        import torch

        return Accelerator("gpu", torch.cuda.get_device_name(0), torch.cuda.device_count())
    if requested == "gpu":
        raise UserError(f"--accelerator gpu: {problem} Use --accelerator cpu, or auto.")
    return _cpu(remark=f"The GPU is not used: {problem}")


def is_certainly_cpu(requested: AcceleratorName) -> bool:
    """Returns whether `find_accelerator` would choose the CPU without checking a GPU."""
    return requested == "cpu" or (requested == "auto" and not _has_gpu_driver())


def has_fast_bfloat16() -> bool:
    """Returns whether the CPU has instructions with which oneDNN computes in bfloat16.

    Otherwise torch emulates bfloat16, several times slower than float32. torch gives the same
    answer (`torch.ops.mkldnn._is_mkldnn_bf16_supported`); here its import would take too long.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()  # oneDNN reads it, too
    if platform.machine() != "x86_64":
        return "bf16" in _cpuinfo("Features").split()
    flags = set(_cpuinfo("flags").split())
    is_avx512 = flags >= {"avx512bw", "avx512dq", "avx512vl"}
    is_fast = is_avx512 or flags >= {"avx_ne_convert", "avx_vnni_int8"}
    return is_fast and limit not in ("SSE41", "AVX", "AVX2", "AVX2_VNNI")


def use_accelerator(name: Literal["cpu", "gpu"]) -> None:
    """Makes Megatron and NeMo run on an accelerator; call it before any other use of them.

    Imports NeMo, and patches it: for a CPU (`megakit.runtime.cpu`), for absent optional parts
    (`optional_packages`), for collectives of a single rank (`single_rank`), and for reading
    checkpoints without running code in them (`safe_reading`).

    Raises:
        ValueError: The name is not `cpu` or `gpu`.
    """
    if name not in ("cpu", "gpu"):
        raise ValueError(f"accelerator {name!r}: expected 'cpu' or 'gpu'; see find_accelerator()")
    from megakit.runtime import cpu, optional_packages, safe_reading, single_rank

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "cpu":
            cpu.patch_torch()
        optional_packages.install_stand_ins()
        if name == "cpu":
            cpu.patch_frameworks()
        single_rank.skip_collectives()
        safe_reading.install_safe_readers()


def _cpu(remark: str | None = None) -> Accelerator:
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    return Accelerator("cpu", name, len(os.sched_getaffinity(0)), remark)


def _cpuinfo(entry: str) -> str:
    """Returns an entry of the first CPU in /proc/cpuinfo; empty if it does not exist."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(entry))
    return next(values, "")


def _has_gpu_driver() -> bool:
    """Returns whether NVIDIA's or WSL's device file exists; otherwise torch is not imported."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


def _why_unusable(precision: str) -> str | None:
    """Multiplies small matrices on the first GPU; returns one sentence on a failure, or None."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        reasons = [str(warning.message).splitlines()[0] for warning in caught]
        return (reasons[0] if reasons else "torch finds no usable CUDA device").rstrip(".") + "."
    precision = "bf16-mixed" if precision == "auto" else precision
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    try:
        square = torch.ones(16, 16, dtype=dtype, device="cuda")
        (square @ square).sum().item()
    except RuntimeError as error:
        name = torch.cuda.get_device_name(0)
        return f"{name} cannot compute with {precision} ({str(error).splitlines()[0].rstrip('.')})."
    return None
