"""Computes batches on the trainer's device, so that fewer bytes are copied to a GPU.

A dataset computes a batch from numpy arrays. With `on_device`, the arrays are copied to the GPU
before the computation, pixels as bytes instead of floats. On a CPU, and without a trainer,
`on_device` is `torch.from_numpy`, so a notebook reads the same batches.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from numpy.typing import NDArray

CPU = torch.device("cpu")
#: The device on which a thread computes batches, if it is not the CPU.
_thread = threading.local()


def on_device(array: NDArray[Any], like: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a tensor of an array, on the device on which this batch is computed.

    Args:
        array: Any array that `torch.from_numpy` accepts.
        like: A tensor of the batch; the result is on its device. Use it in a transform, because the
            wrapped dataset may compute on the CPU.

    Returns:
        A tensor of the array's shape and type. On the CPU, it shares the array's memory.
    """
    device = getattr(_thread, "device", CPU) if like is None else like.device
    tensor: torch.Tensor = copied(torch.from_numpy(array), device)
    return tensor


@contextlib.contextmanager
def batches_on(device: torch.device) -> Iterator[None]:
    """Lets `on_device` copy to a device, in this thread."""
    before = getattr(_thread, "device", CPU)
    _thread.device = device
    try:
        yield
    finally:
        _thread.device = before


def copied(batch: Any, device: torch.device) -> Any:
    """Returns a batch whose tensors are on a device, copied there without waiting.

    The host has to wait for a copy unless the tensor is in page-locked memory. torch keeps this
    memory until the copy has been made.
    """

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor

    if device.type == "cpu":
        return batch
    return move_data_to_device(apply_to_collection(batch, torch.Tensor, pinned), device)
