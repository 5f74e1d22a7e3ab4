"""Counts the bytes that a rank communicates, by process group."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

#: torch's class has no types.
_TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode
#: Operations that receive a tensor, which its sender counts, or that communicate no tensor.
_NOT_SENT = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_")


class CountCommunication(_TorchDispatchMode):
    """Counts the bytes of collectives and sends inside the block, also in the backward pass.

    A collective counts the bytes of its whole tensor: the reduced one of an all-reduce, the
    gathered one of an all-gather, the scattered one of a reduce-scatter. A ring of n ranks sends
    `2 (n - 1) / n` of an all-reduce's bytes from each rank. Groups of one rank count nothing.

    Attributes:
        calls: One entry for each collective and each send, in order: the description of its group,
            such as `TENSOR_MODEL_PARALLEL_GROUP`, the number of values, and their bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []

    def total(self, group: str, least: int = 1) -> int:
        """Returns the bytes of a group's calls that have at least `least` values."""
        return sum(size for name, values, size in self.calls if name == group and values >= least)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Counts a collective, and runs every operation."""
        if func.namespace == "c10d" and func._opname not in _NOT_SENT:
            self._count(args)
        return func(*args, **(kwargs or {}))

    def _count(self, args: Sequence[Any]) -> None:
        groups = [
            ProcessGroup.unbox(arg)
            for arg in args
            if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
        ]
        if not groups or groups[0].size() == 1:
            return
        tensors = [
            [leaf for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor)] for arg in args
        ]
        whole = max(tensors, key=_bytes)  # of an input and an output
        values = sum(tensor.numel() for tensor in whole)
        self.calls.append((groups[0].group_desc, values, _bytes(whole)))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
