"""Holds the state of the simulated machine: visible GPUs, each tensor's GPU, opened contexts.

All memory is the CPU's. A tensor is on GPU k if the Python object of its storage has the label k.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterable
from typing import Any

import torch

from megakit.testing.rehearsal.counts import Counts

#: The label of memory without a label.
HOST = -1


class _Thread(threading.local):
    """Holds thread-local state.

    Attributes:
        current: The current GPU; as in CUDA, each thread begins with GPU 0.
        target: Destination label of the `_to_copy` that `Tensor.to` calls.
    """

    current = 0
    target: int | None = None


class Machine:
    """The GPUs as one process sees them.

    Attributes:
        gpus: The numbers of the visible GPUs in the machine, in the order of their indices.
        opened: The numbers of the GPUs on which this process has a context.
        counts: What has been counted.
        generators: The default generator of each GPU.
        gpu_of_generator: The index of a generator's GPU, or `HOST`, by its address.
        nccl_groups: The names of the gloo groups that simulate NCCL groups.
        thread: Thread-local state.
    """

    def __init__(self, number: int, counts: Counts) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(gpu) for gpu in range(number)]
        chosen = names if visible is None else visible.split(",")
        # As in CUDA, the first name without a GPU ends the list.
        self.gpus = [int(name) for name in itertools.takewhile(names.__contains__, chosen)]
        self.opened: set[int] = set()
        self.counts = counts
        self.generators: tuple[torch.Generator, ...] = ()
        self.gpu_of_generator: dict[int, int] = {}
        self.nccl_groups: set[str] = set()
        self._owner: int | None = None
        self.thread = _Thread()

    @property
    def is_initialized(self) -> bool:
        """Whether this process has used CUDA."""
        return self._owner == os.getpid()

    @property
    def is_in_bad_fork(self) -> bool:
        """Whether a parent process initialized CUDA before it forked this process."""
        return self._owner not in (None, os.getpid())

    def initialize(self) -> None:
        """Initializes CUDA in this process.

        Raises:
            RuntimeError: The process has no GPU, or its parent used CUDA before the fork.
        """
        if self.is_in_bad_fork:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
                "you must use the 'spawn' start method"
            )
        if not self.gpus:
            raise RuntimeError("No CUDA GPUs are available")
        self._owner = os.getpid()

    def open(self, gpu: int) -> None:
        """Notes that this process has a context on a GPU."""
        self.initialize()
        if self.gpus[gpu] not in self.opened:
            self.opened.add(self.gpus[gpu])
            self.counts.open(self.gpus[gpu])

    def label(self, tensor: torch.Tensor, gpu: int) -> torch.Tensor:
        """Puts a tensor on a GPU, or back to the host."""
        if gpu != HOST:
            self.open(gpu)
        with contextlib.suppress(NotImplementedError):  # it has no storage
            tensor.untyped_storage()._gpu = gpu  # type: ignore[attr-defined]
        return tensor

    def index_of(self, device: Any) -> int | None:
        """Returns the label for a device argument; None without a device, and for `meta`.

        Raises:
            RuntimeError: The machine has no such GPU, as seen by this process.
        """
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
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))
