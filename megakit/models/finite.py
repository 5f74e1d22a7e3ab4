"""A check for weights that are no numbers."""

from typing import Any

import torch


def check_finite(value: Any) -> None:
    """Looks for NaN and infinity in all tensors of nested dictionaries, lists and tuples.

    Raises:
        ValueError: There are some.
    """
    if isinstance(value, torch.Tensor):
        has_fractions = value.is_floating_point() or value.is_complex()
        if has_fractions and not value.isfinite().all():
            raise ValueError("it holds weights that are NaN or infinite")
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            check_finite(part)
