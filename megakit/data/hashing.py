"""SplitMix64 as a function of a counter: random numbers in any order, the same everywhere.

Source: Guy Steele, Doug Lea, Christine Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014. That generator's state is a counter that grows by a constant, its output a hash of the
state ("mix13", a finaliser found by David Stafford), so its n-th output costs the same for every n.
It passes TestU01's BigCrush; 64-bit integer arithmetic is all it needs. Two keys are two places in
one row of 2**64 numbers; as keys are hashes, stretches of n and m numbers overlap with probability
(n + m) / 2**64.

Each function works on arrays of uint64 and on Python's ints alike.
"""

from functools import lru_cache
from typing import Any

import numpy as np

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, made odd: the counter's stride


def mix64(z: Any) -> Any:
    """Hash 64 bits to 64 bits, one to one; in place on arrays."""
    mask = (
        MASK if isinstance(z, int) else None
    )  # arrays of uint64 drop the bits above by themselves
    z ^= z >> 30
    z *= 0xBF58476D1CE4E5B9
    if mask:
        z &= mask
    z ^= z >> 27
    z *= 0x94D049BB133111EB
    if mask:
        z &= mask
    z ^= z >> 31
    return z


def stream(key: Any, counter: Any) -> Any:
    """Return output number `counter` (from 0) of the generator that starts at `key`."""
    return mix64(key + (counter + 1) * GOLDEN & MASK)


def absorb(key: Any, word: Any) -> Any:
    """Return a new key that depends on the old one and a word."""
    return mix64((key ^ word) + GOLDEN & MASK)


@lru_cache(maxsize=64)
def key_of(seed: int) -> int:
    """Turn a seed of any size into a key of 64 bits, by numpy's SeedSequence (stable by promise).

    Raises:
        ValueError: If the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"The seed must not be negative, got {seed}.")
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
