"""Mends Megatron's sum over tensor-parallel ranks.

For a tensor that is not contiguous in memory, such as a transposed one, megatron-core 0.15.3 sums a
copy, but returns the tensor. No error is raised, and a layer of your own then trains on the values
of one rank. The patch is made instead of a check, since a sum of such tensors is no mistake.
"""

import functools
from typing import Any

from torch import Tensor

from megakit.runtime.patching import patch, require_attribute


def mend_sums() -> None:
    """Applies the patch; imports Megatron."""
    from megatron.core import package_info
    from megatron.core.tensor_parallel import mappings

    if package_info.VERSION[:2] >= (0, 19):
        return
    original = require_attribute(mappings, "_reduce")

    @functools.wraps(original)
    def reduce(input_: Tensor, group: Any) -> Tensor:
        total: Tensor = original(input_.contiguous(), group)
        return total

    reason = "it does not sum a tensor that is not contiguous in memory, and raises no error"
    when = "before megatron-core 0.19"
    patch(mappings, "_reduce", reduce, group="safe", reason=reason, when=when)
