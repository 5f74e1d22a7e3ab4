"""Lets a program compute in float64 where it names float32, so that rounding hides nothing."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

SINGLE = torch.float32


def compute_in_float64() -> None:
    """Gives torch's names of float32 the meaning of float64; before the import of Megatron."""
    kind: Any = torch
    kind.storage._storage_type_to_dtype_map()  # torch.save and torch.load keep the right names
    torch.set_default_dtype(torch.float64)
    kind.float32 = kind.float = torch.float64
    kind.Tensor.float = torch.Tensor.double
    named = torch.Tensor.type

    def type_of(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Megatron's optimizers ask for the name of float32."""
        found = named(self, *args, **kwargs)
        return found.replace("Double", "Float") if isinstance(found, str) else found

    kind.Tensor.type = type_of


def in_float64(batch: Any) -> Any:
    """Returns a micro batch with float64 in place of float32, which it has from elsewhere."""

    def cast(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == SINGLE else leaf

    return tree_map(cast, batch)
