"""Computes batches on the trainer's device, so that fewer bytes are copied to a GPU.

A dataset computes a batch from numpy arrays. With `on_device`, the arrays are copied to the GPU
before the computation: pixels as bytes instead of floats, booleans as bits. On a CPU, and
without a trainer, `on_device` is `torch.from_numpy`, so a notebook reads the same batches.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from numpy.typing import NDArray

#: The device on which a thread computes batches, if it is not the CPU.
_thread = threading.local()


@runtime_checkable
class Movable(Protocol):
    """A tensor, or another object with a method `to`."""

    def to(self, device: Any) -> Any:
        """Returns a copy on a device."""


def on_device(array: NDArray[Any], like: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a tensor of an array, on the device on which this batch is computed.

    Args:
        array: Any array that `torch.from_numpy` accepts.
        like: A tensor of the batch; the result is on its device. Use it in a transform, because the
            wrapped dataset may compute on the CPU.

    Returns:
        A tensor of the array's shape and type. On the CPU, it shares the array's memory.
    """
    device = getattr(_thread, "device", None) if like is None else like.device
    if device is None or device.type == "cpu":
        return torch.from_numpy(array)
    if array.dtype != np.bool_ or not array.size:
        return copied(torch.from_numpy(array), device)
    bits = copied(torch.from_numpy(np.packbits(array, bitorder="little")), device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    values = (bits.unsqueeze(1) >> shifts & 1).view(torch.bool)
    return values.flatten()[: array.size].view(array.shape)


@contextlib.contextmanager
def batches_on(device: torch.device | None) -> Iterator[None]:
    """Lets `on_device` copy to a device, in this thread; None or a CPU changes nothing."""
    before = getattr(_thread, "device", None)
    _thread.device = device if device is not None and device.type != "cpu" else None
    try:
        yield
    finally:
        _thread.device = before


def copied(batch: Any, device: torch.device) -> Any:
    """Returns a batch whose tensors are on a device, copied there without waiting.

    The host has to wait for a copy unless the tensor is in page-locked memory. torch keeps this
    memory until the copy has been made.
    """
    if device.type == "cpu":
        return batch

    def copy(value: Movable) -> Any:
        if not isinstance(value, torch.Tensor):
            # A batch of its own class. Like Lightning, allow a `to` that returns nothing.
            moved = value.to(device)
            return value if moved is None else moved
        if value.device == device:
            return value
        if value.device.type == "cpu" and not value.is_pinned():
            value = value.pin_memory()
        return value.to(device, non_blocking=True)

    return apply_to_collection(batch, Movable, copy)
