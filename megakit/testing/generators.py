"""Saves, sets and restores the global generators of torch, numpy and random."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from megakit.testing.compare import first_difference


def set_generators(seed: int) -> None:
    """Set the CPU's generators to the states of a seed, as those of each rank."""
    torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
    np.random.set_state(np.random.RandomState(seed).get_state())
    random.setstate(random.Random(seed).getstate())


def generator_states() -> dict[str, Any]:
    """Return the generators' states by name."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["torch.cuda"] = torch.cuda.get_rng_state_all()
    return states


def changed_generators(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the generators whose states differ."""
    # Python's state is a tuple of 625 integers, which Python itself compares much faster.
    return [
        name
        for name, state in before.items()
        if (state != after[name] if name == "random" else first_difference(state, after[name]))
    ]


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the states of the CPU's generators at the end of the block."""
    states = generator_states()
    try:
        yield
    finally:
        torch.set_rng_state(states["torch"])
        np.random.set_state(states["numpy"])
        random.setstate(states["random"])
