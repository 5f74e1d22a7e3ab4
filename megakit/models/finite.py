"""Checks weights for NaN and infinity."""

import torch


def check_finite(value: object) -> None:
    """Checks that no tensor in nested dictionaries, lists and tuples contains NaN or infinity.

    Raises:
        ValueError: A tensor contains NaN or infinity.
    """
    if isinstance(value, torch.Tensor):
        has_fractions = value.is_floating_point() or value.is_complex()
        if has_fractions and not value.isfinite().all():
            raise ValueError("it contains weights that are NaN or infinite")
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            check_finite(part)
