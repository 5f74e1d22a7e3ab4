"""Saves, sets and restores the global generators of torch, numpy and random; records seeding."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from megakit.testing.samples import first_difference

#: The functions that seed global generators, by module.
SEEDING = {
    torch: ("manual_seed", "seed"),
    torch.random: ("manual_seed",),
    torch.cuda: ("manual_seed", "manual_seed_all"),
    np.random: ("seed",),
    random: ("seed",),
}


def set_generators(seed: int) -> None:
    """Set the CPU's generators to the states of a seed, without calls of the seeding functions."""
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


@contextmanager
def seed_calls() -> Iterator[list[str]]:
    """Yield a list that gets the names of the seeding functions called inside the block."""
    calls: list[str] = []
    with ExitStack() as stack:
        for module, names in SEEDING.items():
            for name in names:
                function = getattr(module, name)
                recorded = partial(_record, calls, f"{module.__name__}.{name}", function)
                stack.enter_context(patch.object(module, name, recorded))
        yield calls


def _record(
    calls: list[str], name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    calls.append(name)
    return function(*args, **kwargs)
