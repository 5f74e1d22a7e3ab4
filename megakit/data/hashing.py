"""Computes the random numbers of SplitMix64 by their number, in any order, on any platform.

Source: Guy Steele, Doug Lea, Christine Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014. The generator's state is a counter that grows by a constant. The output is a hash of
the state ("mix13", a finalizer by David Stafford), so every output takes the same time. SplitMix64
passes TestU01's BigCrush and needs only 64-bit integer arithmetic. All keys share one cyclic
sequence of 2**64 numbers; a key is a position in this sequence. As keys are hashes, n numbers of
one key and m numbers of another overlap with probability (n + m) / 2**64.

Each function accepts arrays of uint64 and Python's ints.
"""

from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # increment of the counter: 2**64 / golden ratio, rounded to odd


Words = TypeVar("Words", int, NDArray[Any])


def mix64(z: Words) -> Words:
    """Hash 64 bits to 64 bits, one to one; changes arrays in place."""
    mask = MASK if isinstance(z, int) else None  # uint64 arithmetic wraps around without a mask
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


def stream(key: int | np.uint64, counter: Words) -> Words:
    """Return output number `counter`, from 0, of the generator with the start state `key`."""
    return mix64(key + (counter + 1) * GOLDEN & MASK)


def absorb(key: np.uint64 | NDArray[Any], word: NDArray[Any]) -> NDArray[Any]:
    """Return a new key that depends on a key and a word of 64 bits."""
    return mix64((key ^ word) + GOLDEN & MASK)


@lru_cache(maxsize=64)
def key_of(seed: int) -> int:
    """Convert a seed of any size to a key of 64 bits.

    Numpy guarantees that SeedSequence does not change between versions.
    """
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
