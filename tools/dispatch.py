"""Sees each operation of torch that a block of code calls, and may change it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.utils import _python_dispatch

#: torch's class has no types.
_TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode


class DispatchMode(_TorchDispatchMode):
    """Calls `operate(func, args, kwargs)` for each operation inside a `with` block."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Returns what `operate` returns; torch passes no kwargs if there are none."""
        return self.operate(func, args, kwargs or {})
