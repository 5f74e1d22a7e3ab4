"""Sets, compares and restores the global generators of torch, numpy and random."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def set_generators(seed: int) -> None:
    """Set the CPU's generators to the states of a seed."""
    torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
    np.random.set_state(np.random.RandomState(seed).get_state())
    random.setstate(random.Random(seed).getstate())


def generator_states() -> dict[str, Any]:
    """Return the states of the CPU's generators by name, as values that `==` compares."""
    numpy_state: Any = np.random.get_state()
    name, numbers, *rest = numpy_state
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (name, numbers.tobytes(), *rest),
        "random": random.getstate(),
    }


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the states of the CPU's generators at the end of the block."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
