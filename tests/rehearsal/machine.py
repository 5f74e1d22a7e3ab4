"""The state of the simulated machine: the visible GPUs, and which GPU each tensor is on.

All memory is the CPU's. A tensor is on GPU k if the Python object of its storage has the label k.
"""

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megakit.runtime.patching import require_attribute

#: The environment variable that names the folder of the processes' reports.
REPORT = "REHEARSE_REPORT"
#: What a report counts: waits of the host for a GPU; operations of torch that write to a GPU's
#: memory, each as one kernel, of however many it consists on a GPU; replays of graphs, whose
#: operations are not counted again; copies from the host to a GPU, which are no kernels, and
#: their bytes. Views and allocations are neither, and a capture counts nothing.
COUNTS = ("synchronizations", "kernels", "launches", "copies", "copied_bytes")
#: The label of memory without a label.
HOST = -1
CPU = torch.device("cpu")


class _Thread(threading.local):
    current = 0  # the thread's GPU
    target: int | None = None  # where `Tensor.to` copies to
    stream: Any = None  # the current stream; None is the default one
    capture: Any = None  # the graph that the thread captures


class Machine:
    """The GPUs as one process sees them; `opened` has those on which it has a context."""

    def __init__(self, number: int) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(gpu) for gpu in range(number)]
        chosen = names if visible is None else visible.split(",")
        # As in CUDA, the first name without a GPU ends the list.
        self.gpus = [int(name) for name in itertools.takewhile(names.__contains__, chosen)]
        self.opened: list[int] = []
        self.counts = dict.fromkeys(COUNTS, 0)
        self.capture_of_all: Any = None  # a graph whose capture forbids all threads to wait
        self.generators: tuple[Any, ...] = ()  # the default generators
        self.gpu_of_generator: dict[int, int] = {}  # by the generator's address
        self.nccl_groups: set[str] = set()  # names of gloo groups in the place of NCCL's
        self.owner: int | None = None  # the process that has used CUDA
        self.thread = _Thread()

    def initialize(self) -> None:
        """Initializes CUDA in this process, or raises the error of CUDA."""
        if self.owner not in (None, os.getpid()):
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
                "you must use the 'spawn' start method"
            )
        if not self.gpus:
            raise RuntimeError("No CUDA GPUs are available")
        self.owner = os.getpid()

    def open(self, gpu: int) -> None:
        """Notes that this process has a context on a GPU."""
        self.initialize()
        if self.gpus[gpu] not in self.opened:
            self.opened.append(self.gpus[gpu])
            self.write()

    def wait(self, *_: Any, **__: Any) -> None:
        """Notes that the host waits for a GPU, which breaks the capture of a graph."""
        if (capture := self.thread.capture or self.capture_of_all) is not None:
            capture.is_broken = True
            raise torch.AcceleratorError(
                "CUDA error: operation not permitted when stream is capturing"
            )
        self.counts["synchronizations"] += 1

    def write(self) -> None:
        """Writes the report of a process that has opened a GPU to `PID.json`."""
        if REPORT in os.environ and self.owner == os.getpid() and self.opened:
            path = Path(os.environ[REPORT], f"{os.getpid()}.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            report: dict[str, Any] = {"rank": int(os.environ.get("RANK", "0"))}
            report |= {"opened": self.opened, **self.counts}
            part = path.with_suffix(".part")  # a process that is killed here leaves no half report
            part.write_text(json.dumps(report))
            part.replace(path)

    def label(self, tensor: torch.Tensor, gpu: int) -> torch.Tensor:
        """Puts a tensor on a GPU, or back to the host."""
        if gpu != HOST:
            self.open(gpu)
        with contextlib.suppress(NotImplementedError):  # it has no storage
            tensor.untyped_storage()._gpu = gpu  # type: ignore[attr-defined]
        return tensor

    def index_of(self, device: Any) -> int | None:
        """Returns the label for a device argument; None without a device, and for `meta`."""
        if device is None:
            return None
        if not isinstance(device, int):
            device = torch.device(device)
            if device.type != "cuda":
                return HOST if device.type == "cpu" else None
            device = -1 if device.index is None else device.index
        index = self.thread.current if device < 0 else device
        if index >= len(self.gpus):
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: cuda:{index}, of {len(self.gpus)} GPUs"
            )
        return int(index)


def replace(owner: Any, **attributes: Any) -> None:
    """Replaces existing attributes of a module or a class."""
    for name, value in attributes.items():
        require_attribute(owner, name)
        setattr(owner, name, value)


def label_of(tensor: torch.Tensor) -> int:
    """Returns the index of the GPU that a tensor is on, or `HOST`."""
    try:
        label: int = vars(tensor.untyped_storage()).get("_gpu", HOST)
    except (NotImplementedError, RuntimeError):  # it has no storage
        return HOST
    return label


def is_pinned(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is in page-locked memory."""
    return "_pinned" in vars(tensor.untyped_storage())


def tensors_in(values: Any) -> Iterable[torch.Tensor]:
    """Yields the tensors in nested lists, tuples and dicts."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from tensors_in(value)
