"""Computes batches on the trainer's device: on a GPU from arrays that stay there.

A dataset computes a batch from numpy arrays. `take` reads rows of an array. On a GPU, it reads them
from a copy of the array that stays in the GPU's memory, so that only indices are sent for a batch.
`on_device` sends a whole array, for what is computed for one batch. On a CPU, and without a
trainer, the two functions are numpy's `take` and `torch.from_numpy`.
"""

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray

from megakit.data.indices import IntArray

CPU = torch.device("cpu")
#: The largest share of a GPU's free memory that one array may take to stay there.
KEPT_SHARE = 0.25
#: Held by a thread that sends work to a GPU for a batch, and by whoever captures a CUDA graph: the
#: graph would contain the work of the other thread.
gpu_lock = threading.Lock()
#: The `device` on which a thread computes batches, if it is not the CPU, and the `sent` arrays of
#: its current batch.
_thread = threading.local()
#: Copies of arrays on a GPU, by the array's identity and the device.
_kept: dict[tuple[int, torch.device], torch.Tensor | None] = {}


def take(array: NDArray[Any], indices: IntArray) -> torch.Tensor:
    """Returns rows of an array, on the device on which this batch is computed.

    Args:
        array: Any array of numbers, (N, ...), that does not change. Pass the same object for every
            batch, such as an attribute of the dataset: a GPU keeps a copy of each object, unless
            the copy would take more than a quarter of the GPU's free memory.
        indices: The rows, int64 (B,), from 0 to N - 1. A GPU ends the process for another index.

    Returns:
        A tensor (B, ...) of the array's type.
    """
    device = getattr(_thread, "device", CPU)
    kept = None if device == CPU else _copy_of(array, device)
    if kept is None:
        return on_device(array.take(indices, axis=0))
    return kept.index_select(0, on_device(indices))


def on_device(array: NDArray[Any], like: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a tensor of an array, on the device on which this batch is computed.

    Args:
        array: Any array that `torch.from_numpy` accepts. Within a batch, the same object is sent to
            a GPU once, so it must not change.
        like: A tensor of the batch; the result is on its device. Use it in a transform, because the
            wrapped dataset may compute on the CPU.

    Returns:
        A tensor of the array's shape and type. On the CPU, it shares the array's memory.
    """
    device = getattr(_thread, "device", CPU) if like is None else like.device
    if device.type == "cpu":
        return torch.from_numpy(array)
    sent = getattr(_thread, "sent", {})
    if id(array) not in sent:  # the array is kept, so that no other array gets its identity
        sent[id(array)] = array, copied(torch.from_numpy(array), device)
    tensor: torch.Tensor = sent[id(array)][1]
    return tensor


@contextlib.contextmanager
def batches_on(device: torch.device) -> Iterator[None]:
    """Lets `take` and `on_device` compute a batch on a device, in this thread."""
    before = vars(_thread).copy()
    _thread.device, _thread.sent = device, {}
    try:
        yield
    finally:
        vars(_thread).clear()
        vars(_thread).update(before)


def copied(batch: Any, device: torch.device) -> Any:
    """Returns a batch whose tensors are on a device, copied there without waiting.

    The host has to wait for a copy unless the tensor is in page-locked memory. torch keeps this
    memory until the copy has been made.
    """
    if device.type == "cpu" or _is_there(batch, device):
        return batch
    # Here, because the first files of the ladder read their samples without Lightning.
    from lightning.fabric.utilities import move_data_to_device
    from lightning_utilities.core.apply_func import apply_to_collection

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor

    return move_data_to_device(apply_to_collection(batch, torch.Tensor, pinned), device)


def _is_there(batch: Any, device: torch.device) -> bool:
    """Tells quickly whether a usual batch is on a device; False also means 'do not know'."""
    return type(batch) is dict and all(
        isinstance(tensor, torch.Tensor) and tensor.device == device for tensor in batch.values()
    )


def _copy_of(array: NDArray[Any], device: torch.device) -> torch.Tensor | None:
    """Returns the array's copy on a GPU, made at the first call; None if it would be too large."""
    key = id(array), device
    if key not in _kept:
        fits = array.nbytes <= KEPT_SHARE * torch.cuda.mem_get_info(device)[0]
        if not fits:
            warnings.warn(
                f"An array of {array.nbytes / 1e9:.1f} GB is more than a quarter of the GPU's free "
                "memory. It stays on the host, which sends its rows for each batch.",
                stacklevel=3,
            )
        _kept[key] = torch.tensor(array, device=device) if fits else None
        weakref.finalize(array, functools.partial(_kept.pop, key, None))
    return _kept[key]
