"""Shuffles a range of any length without memory, by Kensler's hashed permutation.

`permute(i, length, seed)` returns element i of a shuffled range, without computing the whole range.
Source: Andrew Kensler, "Correlated Multi-Jittered Sampling", Pixar Technical Memo 13-01, 2013. His
`permute` works on 32-bit words. For every length up to 2**32, the values here equal those of
`bionemo.core.data.permute` in bionemo-core 2.4.5 (Apache-2.0).

The algorithm. Let k be the number of bits of `length - 1`. The hash consists of steps that map the
integers modulo 2**k one to one onto themselves: XOR with a key; multiplication by an odd number;
XOR of a number with itself shifted right. So the hash is one to one, too. A result at or above
`length` is hashed again until it is below `length` ("cycle walking"). This keeps the map one to one
and takes at most two hashes on average. Finally, the seed is added modulo `length`.

All arithmetic is modulo 2**k, so the result does not depend on the width of the machine word. If k
is at most 32, the code uses 32-bit words, which are twice as fast. Otherwise it uses 64-bit words;
for such lengths the two sources are not one to one. Seeds may have any size: the steps use the seed
shifted right by several numbers of bits, modulo 2**k, and the seed modulo `length`.
"""

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from megakit.data.indices import Int, IntArray, as_int, as_int_array, as_seed

MAX_LENGTH = 2**63 - 1

# Number of elements hashed at a time. A block and one temporary array, 1 MiB in all, fit in a
# core's caches. Smaller blocks are slower, because numpy's cost per call grows; this matters most
# while the last elements are hashed again.
_BLOCK = 65536

_SEED = "The permutation seed"

Words = TypeVar("Words", int, NDArray[Any])


@overload
def permute(index: Int, length: Int, seed: Int) -> int: ...
@overload
def permute(index: NDArray[Any], length: Int, seed: Int | NDArray[Any]) -> IntArray: ...
@overload
def permute(index: Int, length: Int, seed: NDArray[Any]) -> IntArray: ...
def permute(index: Int | NDArray[Any], length: Int, seed: Int | NDArray[Any]) -> int | IntArray:
    """Return the element at a position of a shuffled range, in O(1) time and memory.

    Args:
        index: A position in [0, length), or an array of positions in any shape.
        length: Length of the range, from 1 to 2**63 - 1.
        seed: Seed of the shuffle, any integer that is not negative; or an array of seeds below
            2**64, one for each index (the shapes broadcast).

    Returns:
        The number in [0, length) at this position: an int, or int64 in the shape of the arrays. For
        a given length and seed the map is one to one.

    Raises:
        TypeError: If an argument is not an integer; booleans are not integers here.
        ValueError: If an index is outside [0, length), the length is outside [1, 2**63), or a seed
            is negative.
    """
    length = as_int(length, "The length")
    if not 1 <= length <= MAX_LENGTH:
        raise ValueError(
            f"The length of the permuted range must be from 1 to 2**63 - 1, got {length}."
        )
    if isinstance(seed, np.ndarray):
        indices = as_int_array(index, "The indices")
        indices, seeds = np.broadcast_arrays(indices, as_int_array(seed, "The seeds"))
        as_seed(int(seeds.min(initial=0)), _SEED)
        return _permute_array(indices, length, seeds.reshape(-1).astype(np.uint64))
    seed = as_seed(seed, _SEED)
    if isinstance(index, np.ndarray):
        return _permute_array(as_int_array(index, "The indices"), length, seed)
    number = as_int(index, "The index")
    _check_index(number, length)
    mask = _mask_of(length)
    keys = _keys(seed, mask)
    number = _hash(number, keys, mask)
    while number >= length:
        number = _hash(number, keys, mask)
    return (number + seed) % length


def _permute_array(indices: NDArray[Any], length: int, seed: int | NDArray[np.uint64]) -> IntArray:
    if indices.size:
        _check_index(int(indices.min()), length)
        _check_index(int(indices.max()), length)
    mask = _mask_of(length)
    dtype = np.uint32 if mask < 2**32 else np.uint64
    typed_mask, last, flat = dtype(mask), dtype(length - 1), indices.reshape(-1)
    permuted = np.empty(flat.size, np.int64)
    for start in range(0, flat.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        seeds: Any = seed if isinstance(seed, int) else seed[block]
        keys = [np.asarray(key, dtype) for key in _keys(seeds, mask)]
        numbers = _hash(flat[block].astype(dtype), keys, typed_mask)
        outside = np.flatnonzero(numbers > last)
        while outside.size:
            their_keys = [key[outside] if key.ndim else key for key in keys]
            again = _hash(numbers[outside], their_keys, typed_mask)
            numbers[outside] = again
            outside = outside[again > last]
        total = numbers.astype(np.uint64) + np.asarray(seeds % length, np.uint64)
        # Modulo length, as a negative difference wraps around to a huge number.
        permuted[block] = np.minimum(total, total - np.uint64(length))
    return permuted.reshape(indices.shape)


def _mask_of(length: int) -> int:
    """Return 2**k - 1, where k is the number of bits of length - 1."""
    return (1 << (length - 1).bit_length()) - 1


def _keys(seed: Words, mask: int) -> list[Words]:
    """List the numbers of the hash that depend on the seed, in the order of their use."""
    factor = (1 | seed >> 27) * 0x6935FA69
    return [key & mask for key in (seed, seed >> 16, seed >> 8, seed >> 23, factor)]


def _hash(x: Words, keys: Sequence[Words], mask: Any) -> Words:
    """Hash numbers in [0, mask] one to one; changes arrays in place."""
    x ^= keys[0]
    x *= 0xE170893D
    x &= mask
    x ^= keys[1]
    x ^= x >> 4
    x ^= keys[2]
    x *= 0x0929EB3F
    x &= mask
    x ^= keys[3]
    x ^= x >> 1
    x *= keys[4]
    x &= mask
    x ^= x >> 11
    x *= 0x74DCB303
    x &= mask
    x ^= x >> 2
    x *= 0x9E501CC3
    x &= mask
    x ^= x >> 2
    x *= 0xC860A3DF
    x &= mask
    return x


def _check_index(index: int, length: int) -> None:
    if not 0 <= index < length:
        raise ValueError(f"The index to permute must be in the range [0, {length}), got {index}.")
