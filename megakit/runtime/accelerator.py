"""Chooses GPU or CPU, and makes the frameworks run on the chosen accelerator."""

import json
import os
import platform
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megakit.errors import UserError
from megakit.runtime.interpreter import search_path

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


_PROBE = "import sys; from megakit.runtime.accelerator import print_probe; print_probe(sys.argv[1])"


def find_accelerator(
    requested: AcceleratorName = "auto", precision: str = "32", *, in_child: bool = False
) -> Accelerator:
    """Decides between GPU and CPU without changing anything.

    The check of a GPU leaves a CUDA context on the GPU of this process (`own_gpu`), in which the
    process then computes.

    Args:
        requested: `auto` chooses a GPU that works at this precision, else the CPU.
        precision: `bf16-mixed` or `32`, which a GPU has to support; `auto` is `bf16-mixed` there.
        in_child: Whether a child process checks the GPU, for a process that does not compute: a
            context takes half a GB of the GPU's memory, and a GPU in the compute mode
            EXCLUSIVE_PROCESS accepts the context of one process only.

    Raises:
        UserError: `gpu` was requested and no GPU can be used; the message states the reason.
    """
    if is_certainly_cpu(requested):
        return _cpu()
    found: Accelerator | str = "this machine has no NVIDIA GPU (or its driver is not loaded)."
    if _has_gpu_driver():
        found = _probe_in_child(precision) if in_child else _probe(precision)
    if isinstance(found, Accelerator):
        return found
    if requested == "gpu":
        raise UserError(f"--accelerator gpu: {found} Use --accelerator cpu, or auto.")
    return _cpu(remark=f"The GPU is not used: {found}")


def own_gpu() -> int:
    """Returns the index of the GPU that this process uses: 0, or by its rank on this machine.

    Under srun, each process of a machine may see only its own GPU, whose index is then 0.
    """
    import torch

    rank = os.environ.get("LOCAL_RANK", "")
    return int(rank) % max(1, torch.cuda.device_count()) if rank.isdecimal() else 0


def is_certainly_cpu(requested: AcceleratorName) -> bool:
    """Returns whether `find_accelerator` would choose the CPU without checking a GPU."""
    return requested == "cpu" or (requested == "auto" and not _has_gpu_driver())


#: Values of `ONEDNN_MAX_CPU_ISA` with which oneDNN uses no instructions for bfloat16.
WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")


def has_fast_bfloat16() -> bool:
    """Returns whether the CPU has instructions with which oneDNN computes in bfloat16.

    Otherwise bfloat16 is emulated, and slower than float32. oneDNN also emulates it on CPUs with
    AVX-512 but without the instructions for bfloat16, although torch then calls bfloat16 supported
    (`torch.ops.mkldnn._is_mkldnn_bf16_supported`).
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()  # oneDNN reads it, too
    if platform.machine() != "x86_64":
        return "bf16" in _cpuinfo("Features").split()
    flags = set(_cpuinfo("flags").split())
    is_fast = flags & {"avx512_bf16", "amx_bf16"} or flags >= {"avx_ne_convert", "avx_vnni_int8"}
    return bool(is_fast) and limit not in WITHOUT_BFLOAT16


def use_accelerator(name: Literal["cpu", "gpu"]) -> None:
    """Makes Megatron and NeMo run on an accelerator; call it before any other use of them.

    Imports NeMo, and patches it: for a CPU (`megakit.runtime.cpu`), for absent optional parts
    (`optional_packages`), for collectives of a single rank (`single_rank`), for loops over weights
    (`multi_tensor`), and for reading checkpoints without running code in them (`safe_reading`).

    Raises:
        ValueError: The name is not `cpu` or `gpu`.
    """
    if name not in ("cpu", "gpu"):
        raise ValueError(f"accelerator {name!r}: expected 'cpu' or 'gpu'; see find_accelerator()")
    from megakit.runtime import cpu, multi_tensor, optional_packages, safe_reading, single_rank

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "cpu":
            cpu.patch_torch()
        optional_packages.install_stand_ins()
        if name == "cpu":
            cpu.patch_frameworks()
        single_rank.skip_collectives()
        multi_tensor.replace_loops()
        safe_reading.install_safe_readers()


def use_full_float32() -> None:
    """Makes GPUs compute float32 with all 23 bits of the mantissa, and not in TF32 with 10 bits.

    NVIDIA's images set `TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1`, which makes torch multiply matrices in
    TF32. In convolutions, TF32 is torch's default everywhere.
    """
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    for name in ("conv", "rnn"):  # newer settings, which override the older one
        if (settings := getattr(torch.backends.cudnn, name, None)) is not None:
            settings.fp32_precision = "ieee"


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


def _probe(precision: str) -> Accelerator | str:
    """Multiplies small matrices on this process's GPU.

    Returns:
        The GPU; or, if it cannot be used, one sentence that states the reason.
    """
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        reasons = [str(warning.message) for warning in caught]
        return _first_line(reasons[0] if reasons else "torch finds no usable CUDA device") + "."
    try:
        # Initializes CUDA, which `is_available` may not do: Lightning makes it ask NVML instead.
        name = torch.cuda.get_device_name(own_gpu())
    except Exception as error:  # of several types, by what is wrong with the driver
        return _first_line(str(error) or repr(error)) + "."
    precision = "bf16-mixed" if precision == "auto" else precision
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    try:
        square = torch.ones(16, 16, dtype=dtype, device=f"cuda:{own_gpu()}")
        (square @ square).sum().item()
    except RuntimeError as error:
        return f"{name} cannot compute with {precision} ({_first_line(str(error))})."
    return Accelerator("gpu", name, torch.cuda.device_count())


def _first_line(message: str) -> str:
    """Returns the first line of a message without its full stop."""
    return message.partition("\n")[0].rstrip(".")


def _probe_in_child(precision: str) -> Accelerator | str:
    """Returns the result of `_probe` in a child process.

    A forked child would not do: this process may have initialized CUDA, for example in a notebook.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE, precision],
        env={**os.environ, "PYTHONPATH": search_path()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:  # the driver may end a process
        last = done.stderr.strip().rpartition("\n")[2]
        return f"the check of the GPU ended with status {done.returncode} ({last})."
    found = json.loads(done.stdout.splitlines()[-1])
    return Accelerator(**found) if isinstance(found, dict) else str(found)


def print_probe(precision: str) -> None:
    """Runs in the child process: prints the result of `_probe`."""
    found = _probe(precision)
    print(json.dumps(asdict(found) if isinstance(found, Accelerator) else found), flush=True)
    os._exit(0)  # a normal exit would tear torch down first
