"""Simulates GPUs on a machine without a GPU: CPU tensors with labels that name a GPU.

In such a rehearsal, a program computes on the CPU, and every operation of torch is checked and
counted. An operation that would fail on a GPU raises an error: tensors of two devices in one
operation, a generator of another device, `numpy()` of a GPU's tensor, a CPU tensor over NCCL, CUDA
in a forked process, a GPU that does not exist. The rehearsal counts kernels, synchronizations of
the host with the GPU, copies and their bytes, by source line and by training step, and records
which process opens which GPU. A command that hides the GPUs, such as `--accelerator cpu`, computes
as usual, but slower.

A rehearsal does not detect races between streams, and does not simulate the thread of a GPU's
backward pass, `autocast("cuda")`, TF32, the rounding of GPU kernels, Triton, memory in use, time,
drivers, or failures of NCCL. Functions are not compiled. A fused CPU operation counts as one
kernel, though a GPU may need several. torch's C++ code regards every tensor as a CPU tensor. During
a backward pass, the rehearsal therefore treats `device="cpu"` as the GPU, and cannot detect a
tensor that a backward function wrongly creates on the CPU.
"""

import atexit
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wrapt import register_post_import_hook

from megakit.runtime.patching import require_attribute

#: The environment variables of a rehearsed process: the number of GPUs, the folder of its report.
GPUS, REPORT = "REHEARSE_GPUS", "REHEARSE_REPORT"
#: On PYTHONPATH, this folder makes Python rehearse from the start.
HOOK = Path(__file__).resolve().parents[1] / "hook"


@contextlib.contextmanager
def rehearse_gpu(number: int = 1) -> Iterator[Any]:
    """Simulates GPUs in this process until the end of the context.

    Args:
        number: Number of GPUs that the machine has.

    Yields:
        The counts of this process, a `Counts`: `total`, `places` and `opened`.

    Raises:
        RuntimeError: The process already uses or rehearses a GPU, or has called
            `use_accelerator("cpu")`, after which it cannot use a GPU.
    """
    cpu = sys.modules.get("megakit.runtime.cpu")
    if cpu is not None and cpu.patch_torch.cache_info().currsize:
        raise RuntimeError(
            "This process has applied the patches for a CPU, and can use no GPU any more. Rehearse "
            "in a process of its own: a script with the environment `rehearsed_environment()`."
        )
    import torch

    from megakit.runtime import accelerator

    is_in_use: Any = torch.cuda.is_initialized
    if is_in_use.__module__ != "torch.cuda" or is_in_use():
        raise RuntimeError("This process uses a GPU, or rehearses one, already.")
    counts, replaced = _install(number)
    replaced.set(accelerator, _has_gpu_driver=lambda: True)
    try:
        yield counts
    finally:
        replaced.undo()


def rehearsed_environment(number: int = 1, report: Path | None = None) -> dict[str, str]:
    """Returns an environment in which every Python process rehearses GPUs.

    Args:
        number: Number of GPUs that the machine has; CUDA_VISIBLE_DEVICES chooses among them.
        report: Folder in which each process that opens a GPU writes `PID.json`: its rank, the GPUs
            that it opened and where, its counts in all and by training step (`Counts`).
    """
    environment = {**os.environ, GPUS: str(number)}
    search_path = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(search_path)
    if report is not None:
        environment[REPORT] = str(report)
    return environment


def rehearse_when_asked() -> None:
    """Starts the rehearsal when torch is imported, if REHEARSE_GPUS is set; for `sitecustomize`.

    torch is not imported here, because commands such as `--help` do not import it, either.
    """
    if GPUS not in os.environ:
        return
    register_post_import_hook(_install_for_ever, "torch")
    register_post_import_hook(
        lambda module: vars(module).update(_has_gpu_driver=lambda: True),
        "megakit.runtime.accelerator",
    )


def _install_for_ever(_: Any) -> None:
    report = Path(os.environ[REPORT]) if REPORT in os.environ else None
    counts, _ = _install(int(os.environ[GPUS]), report)
    atexit.register(counts.write)
    for module, name in LOOPS.items():
        register_post_import_hook(functools.partial(_count_steps, name, counts), module)


def _install(number: int, report: Path | None = None) -> tuple[Any, Any]:
    """Starts the rehearsal; returns its `Counts`, and its `Replacements`, whose `undo` ends it."""
    from megakit.testing.rehearsal.collectives import replace_nccl
    from megakit.testing.rehearsal.counts import Counts
    from megakit.testing.rehearsal.cuda import CUDA
    from megakit.testing.rehearsal.dispatch import RehearsalMode
    from megakit.testing.rehearsal.machine import Machine
    from megakit.testing.rehearsal.replacements import Replacements
    from megakit.testing.rehearsal.tensors import TENSORS

    counts, replaced = Counts(report), Replacements()
    machine = Machine(number, counts)
    for install in (*TENSORS, *CUDA, replace_nccl):
        install(replaced, machine)

    # A dispatch mode belongs to one thread.
    begin: Any = require_attribute(threading.Thread, "_bootstrap_inner")

    def begin_in_mode(self: threading.Thread) -> None:
        with RehearsalMode(machine):
            begin(self)

    replaced.set(threading.Thread, _bootstrap_inner=begin_in_mode)
    mode = RehearsalMode(machine)
    mode.__enter__()
    replaced.at_end(lambda: mode.__exit__(None, None, None))
    return counts, replaced


#: The classes whose method `advance` runs a training step, by module.
LOOPS = {
    "lightning.pytorch.loops.training_epoch_loop": "_TrainingEpochLoop",
    "megakit.training.loop": "StepLoop",
}


def _count_steps(name: str, counts: Any, module: Any) -> None:
    """Calls `Counts.step` at the start of each training step of a loop."""
    loop = getattr(module, name)
    advance = loop.advance

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts.step()
        return advance(self, *args, **kwargs)

    loop.advance = counted
