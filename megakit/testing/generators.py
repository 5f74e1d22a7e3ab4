"""Saves, sets and restores the global generators of torch, numpy and random; records seeding."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch


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
    """Record and execute the calls of functions that seed global generators."""
    calls: list[str] = []

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return record

    with ExitStack() as stack:
        for module, function_name in [
            (torch, "manual_seed"),
            (torch, "seed"),
            (torch.random, "manual_seed"),
            (torch.cuda, "manual_seed"),
            (torch.cuda, "manual_seed_all"),
            (np.random, "seed"),
            (random, "seed"),
        ]:
            name = f"{module.__name__}.{function_name}"
            replacement = recording(name, getattr(module, function_name))
            stack.enter_context(patch.object(module, function_name, replacement))
        yield calls
