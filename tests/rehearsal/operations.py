"""Checks every operation of torch as a GPU would, and labels its results."""

import os
import threading
from typing import Any, NoReturn

import torch
from torch.utils import _python_dispatch

from megakit.runtime.patching import require_attribute

from .cuda import install_cuda
from .graphs import Call, is_view
from .machine import HOST, Machine, is_pinned, label_of, replace, tensors_in
from .tensors import install_tensors

#: Operations whose result the host waits for.
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"}
_WAITS |= {"unique_dim", "unique_consecutive", "repeat_interleave.Tensor"}
#: Operations that allocate memory without writing to it, or read a number.
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NO_KERNEL |= {"_local_scalar_dense"}
_COPIES = {"_to_copy", "copy_"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}

_TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode


class RehearsalMode(_TorchDispatchMode):
    """Applies the rules of a GPU to every operation of its thread."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _Operation(self._machine, func, args, dict(kwargs or {})).run()


class _Operation:
    """One call; `gpu` is the GPU among the labels of its tensors, or `HOST`."""

    def __init__(self, machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.machine, self.func, self.args, self.kwargs = machine, func, args, kwargs
        self.namespace, _, self.name = func._schema.name.partition("::")
        self.tensors = list(tensors_in((args, kwargs)))
        self.labels = [label_of(tensor) for tensor in self.tensors]
        self.gpu = max(self.labels, default=HOST)

    def run(self) -> Any:
        """Checks and computes; returns the result with its labels."""
        is_pinned_result = bool(self.kwargs.pop("pin_memory", None))
        where = self._destination()
        if self.namespace == "c10d":
            self._check_collective()
        elif self.name in _COPIES:
            self._wait_for_copy(where, is_pinned_result)
        elif self.name in _INDEXING:
            self._check_index()
        else:
            self._check_devices()
        result = self._compute(where)
        for tensor in tensors_in(result):
            if where != HOST:
                self.machine.label(tensor, where)
            if is_pinned_result:
                vars(tensor.untyped_storage())["_pinned"] = True
        if self.gpu != HOST and not _WAITS.isdisjoint((self.name, str(self.func)[5:])):
            self.machine.wait()
        return result

    def _destination(self) -> int:
        """Returns the label of the result, and replaces a GPU device argument by the CPU."""
        if self.name == "copy_":
            return self.labels[0]
        thread = self.machine.thread
        asked = self.machine.index_of(self.kwargs.get("device"))
        if asked is not None and asked != HOST:
            self.kwargs["device"] = torch.device("cpu")
        if self.name == "_to_copy":
            # Without `Tensor.to` the call comes from C++, which does not know the labels.
            asked, thread.target = thread.target, None
        elif asked == HOST and torch._C._current_graph_task_id() != -1:
            # In a backward pass, C++ asks for the device of CPU tensors, likewise.
            return self.gpu if self.tensors else thread.current
        return self.gpu if asked is None else asked

    def _wait_for_copy(self, target: int, is_pinned_target: bool) -> None:
        """A copy between host and GPU is asynchronous only from or to page-locked memory."""
        source = self.tensors[-1 if self.name == "copy_" else 0]
        begin = label_of(source)
        if (begin == HOST) == (target == HOST):
            return
        is_async = self.kwargs.get("non_blocking", len(self.args) > 2 and self.args[2])
        on_host = is_pinned(source) if begin == HOST else is_pinned_target
        if self.name == "copy_" and begin != HOST:
            on_host = is_pinned(self.tensors[0])
        if not (is_async and on_host):
            self.machine.wait()
        elif begin == HOST and self.machine.thread.capture is not None:
            raise RuntimeError(
                f"{self.func}: each replay of this graph would read the page-locked memory anew, "
                "whatever the host has written there by then: copy before the capture"
            )

    def _check_index(self) -> None:
        if self.labels[0] != self.gpu:
            self._refuse("indices should be either on cpu or on the same device as the tensor")
        for tensor, label in zip(self.tensors[1:], self.labels[1:], strict=True):
            # torch writes a single number through `masked_fill_`.
            is_number = label_of(self.tensors[-1]) == HOST and self.tensors[-1].dim() == 0
            is_boolean = tensor.dtype in (torch.bool, torch.uint8) and not is_number
            if self.gpu != HOST and (is_boolean or (label == HOST and tensor.dim())):
                self.machine.wait()
            if self.gpu != HOST and label == HOST and tensor.dim():
                self._count_copy(tensor)

    def _check_devices(self) -> None:
        is_pointwise = torch.Tag.pointwise in self.func.tags or self.name.startswith("_foreach")
        for k, (tensor, label) in enumerate(zip(self.tensors, self.labels, strict=True)):
            is_result = k == 0 and self.name.endswith("_")
            is_read_scalar = label == HOST and tensor.dim() == 0 and not is_result
            if label != self.gpu and not (is_pointwise and is_read_scalar):
                self._refuse("Expected all tensors to be on the same device")

    def _refuse(self, rule: str) -> None:
        found = ", ".join(
            f"{'cpu' if label == HOST else f'cuda:{label}'} {tuple(tensor.shape)}"
            for tensor, label in zip(self.tensors, self.labels, strict=True)
        )
        raise RuntimeError(f"{self.func}: {rule}, but found {found}")

    def _check_collective(self) -> None:
        """NCCL takes tensors of GPUs only."""
        for value in self.args:
            if not isinstance(value, torch.ScriptObject):
                continue
            try:
                group = torch.distributed.ProcessGroup.unbox(value)
            except (RuntimeError, TypeError):  # a ReduceOp
                continue
            is_nccl = group.group_name in self.machine.nccl_groups
            if is_nccl and self.name == "barrier":
                self.machine.wait()
            elif is_nccl and HOST in self.labels:
                raise RuntimeError(f"{self.name}: No backend type associated with device type cpu")

    def _generator(self, where: int) -> torch.Generator | None:
        """Returns the generator of a GPU that the operation draws from."""
        given = self.kwargs.get("generator")
        if given is None:
            is_random = torch.Tag.nondeterministic_seeded in self.func.tags
            return self.machine.generators[where] if where != HOST and is_random else None
        found = self.machine.gpu_of_generator.get(given._cdata, HOST)
        if found != where:
            expected, got = ("cpu" if gpu == HOST else "cuda" for gpu in (where, found))
            raise RuntimeError(
                f"Expected a '{expected}' device type for generator but found '{got}'"
            )
        return given if where != HOST else None

    def _compute(self, where: int) -> Any:
        """Computes, counts and records the operation."""
        call = Call(self.func, self.args, self.kwargs, self._generator(where))
        if max(where, self.gpu) == HOST or is_view(self.func):
            return call.run()
        if (capture := self.machine.thread.capture) is not None:
            return capture.record(call)
        result = call.run()
        if self.name in _COPIES and where != HOST and HOST in self.labels:
            self._count_copy(result)
        elif where != HOST and self.name not in _NO_KERNEL:
            self.machine.counts["kernels"] += 1
        return result

    def _count_copy(self, tensor: torch.Tensor) -> None:
        self.machine.counts["copies"] += 1
        self.machine.counts["copied_bytes"] += tensor.nbytes


def begin_rehearsal(number: int) -> None:
    """Simulates a machine with a number of GPUs; torch has been imported just now."""
    machine = Machine(number)
    install_tensors(machine)
    install_cuda(machine)
    vars(torch.cuda)["rehearsed_counts"] = machine.counts  # tests read it on the way
    leave = os._exit  # with which the scripts end

    def write_and_leave(status: int) -> NoReturn:
        machine.write()
        leave(status)

    os._exit = write_and_leave
    # A dispatch mode belongs to one thread.
    start: Any = require_attribute(threading.Thread, "_bootstrap_inner")

    def start_in_mode(self: threading.Thread) -> None:
        with RehearsalMode(machine):
            start(self)

    replace(threading.Thread, _bootstrap_inner=start_in_mode)
    RehearsalMode(machine).__enter__()
