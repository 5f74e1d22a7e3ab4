"""Choosing where a program runs, and making the stack run there."""

import platform
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megakit.errors import UserError

AcceleratorName = Literal["auto", "cpu", "gpu"]


@dataclass(frozen=True)
class Accelerator:
    """Where a program runs.

    Attributes:
        name: Lightning's name of it, `"cpu"` or `"gpu"`.
        device: What a person calls it: the processor's or the graphics card's name.
        count: How many of them this machine has; processes may outnumber CPUs, never GPUs.
        remark: Why `auto` passed over a GPU that is there, or None.
    """

    name: Literal["cpu", "gpu"]
    device: str
    count: int
    remark: str | None = None


def find_accelerator(requested: AcceleratorName = "auto", precision: str = "32") -> Accelerator:
    """Decides between GPU and CPU without changing anything.

    Args:
        requested: `auto` takes a GPU that works at this precision, else the CPU.
        precision: `bf16-mixed` or `32`; a GPU has to be able to compute in it.

    Raises:
        UserError: `gpu` was requested and none can be used; the message says why.
    """
    if requested == "cpu":
        return _cpu()
    if not _has_gpu_driver():
        if requested == "gpu":
            raise UserError(
                "--accelerator gpu: this machine shows no NVIDIA GPU (no driver is loaded). "
                "Use --accelerator cpu, or auto."
            )
        return _cpu()
    problem = _why_unusable(precision)
    if problem is None:
        import torch

        return Accelerator("gpu", torch.cuda.get_device_name(0), torch.cuda.device_count())
    if requested == "gpu":
        raise UserError(f"--accelerator gpu: {problem} Use --accelerator cpu, or auto.")
    return _cpu(remark=f"The GPU is not used: {problem}")


def is_certainly_cpu(requested: AcceleratorName) -> bool:
    """Whether `find_accelerator` would choose the CPU without a look at any GPU."""
    return requested == "cpu" or (requested == "auto" and not _has_gpu_driver())


def use_accelerator(name: Literal["cpu", "gpu"]) -> None:
    """Makes Megatron and NeMo run on the given accelerator: the one call a program begins with.

    Imports NeMo. On a CPU it applies the patches of `megakit.runtime.cpu`; on a GPU none of them.
    On both, optional parts of NeMo that are absent get stand-ins, collectives of a single rank are
    left out (`alone`), and nothing that checkpoints hold is run (`safe_reading`).

    Raises:
        ValueError: Another name than `cpu` or `gpu`.
    """
    from megakit.runtime import cpu, optional_packages, safe_reading, single_rank

    if name not in ("cpu", "gpu"):
        raise ValueError(f"accelerator {name!r}: expected 'cpu' or 'gpu'; see find_accelerator()")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "cpu":
            cpu.apply()
        optional_packages.install_stand_ins()
        if name == "cpu":
            cpu.apply_to_frameworks()
        single_rank.skip_collectives_of_one()
        safe_reading.read_safely()


def _cpu(remark: str | None = None) -> Accelerator:
    import os

    return Accelerator("cpu", _processor_name(), len(os.sched_getaffinity(0)), remark)


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _has_gpu_driver() -> bool:
    """Whether asking torch is worth its import: NVIDIA's device file, or WSL's."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


def _why_unusable(precision: str) -> str | None:
    """Computes a little on the first GPU; returns one sentence on what went wrong, or None."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        reasons = [str(warning.message).splitlines()[0] for warning in caught]
        return (reasons[0] if reasons else "torch finds no usable CUDA device").rstrip(".") + "."
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    try:
        square = torch.ones(16, 16, dtype=dtype, device="cuda")
        (square @ square).sum().item()
    except RuntimeError as error:
        name = torch.cuda.get_device_name(0)
        return f"{name} cannot compute with {precision} ({str(error).splitlines()[0].rstrip('.')})."
    return None
