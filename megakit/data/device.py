"""Computes batches on the trainer's device: on a GPU from arrays that stay there.

A dataset that keeps its samples in numpy arrays sends the indices of a batch with `on_device`, and
reads the rows with `take`. A GPU keeps a copy of the arrays, so nothing else is sent. On a CPU, and
without a trainer, the two functions are `torch.from_numpy` and numpy's `take`.
"""

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray

from megakit.runtime.patching import require_attribute

CPU = torch.device("cpu")
#: torch's function of nested containers.
_map = require_attribute("torch.utils._pytree", "tree_map")
#: Held by a thread that sends work to a GPU for a batch, and by whoever captures a CUDA graph: the
#: graph would contain the work of the other thread.
gpu_lock = threading.Lock()
#: The `device` on which a thread computes batches, if it is not the CPU.
_thread = threading.local()
#: Copies of arrays on a GPU, by the array's identity.
_kept: dict[int, torch.Tensor] = {}


def on_device(array: NDArray[Any], like: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a tensor of an array, on the device on which this batch is computed.

    Args:
        array: Any array that `torch.from_numpy` accepts.
        like: A tensor of the batch; the result is on its device. Use it in a transform, because the
            wrapped dataset may compute on the CPU.
    """
    device = getattr(_thread, "device", CPU) if like is None else like.device
    return torch.from_numpy(array) if device == CPU else copied(torch.from_numpy(array), device)


def take(array: NDArray[Any], rows: torch.Tensor) -> torch.Tensor:
    """Returns rows of an array, on the device of their indices.

    Args:
        array: Any array of numbers, (N, ...), that does not change. Pass the same object for every
            batch, such as an attribute of the dataset: a GPU keeps a copy of each object.
        rows: The indices from `on_device`, int64 (B,), from 0 to N - 1.
    """
    if rows.device == CPU:
        return torch.from_numpy(array.take(rows.numpy(), axis=0))
    if id(array) not in _kept:
        _kept[id(array)] = torch.tensor(array, device=rows.device)
        weakref.finalize(array, _kept.pop, id(array))
    return _kept[id(array)].index_select(0, rows)


@contextlib.contextmanager
def batches_on(device: torch.device) -> Iterator[None]:
    """Lets `on_device` send arrays to a device, in this thread."""
    _thread.device = device
    try:
        yield
    finally:
        del _thread.device


def copied(batch: Any, device: torch.device) -> Any:
    """Returns a batch whose tensors are on a device, copied there without waiting.

    The host has to wait for a copy unless the tensor is in page-locked memory. torch keeps this
    memory until the copy has been made.
    """
    if device.type == "cpu" or _is_there(batch, device):
        return batch

    def moved(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            pinned = part.pin_memory() if part.device.type == "cpu" else part
            return pinned.to(device, non_blocking=True)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
            return dataclasses.replace(part, **_map(moved, fields))
        return part.to(device) if hasattr(part, "to") else part

    return _map(moved, batch)


def _is_there(batch: Any, device: torch.device) -> bool:
    """Tells quickly whether a usual batch is on a device; False also means 'do not know'."""
    return type(batch) is dict and all(
        isinstance(tensor, torch.Tensor) and tensor.device == device for tensor in batch.values()
    )
