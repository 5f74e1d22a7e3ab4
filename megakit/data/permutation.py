"""Shuffles a range of any length without memory, by Kensler's hashed permutation.

Source: Andrew Kensler, "Correlated Multi-Jittered Sampling", Pixar Technical Memo 13-01, 2013. For
every length up to 2**32, the values equal those of `bionemo.core.data.permute` in bionemo-core
2.4.5 (Apache-2.0), which works on 32-bit words; above, the two sources are not one to one.

Let k be the number of bits of `length - 1`. Each step of the hash maps the integers modulo 2**k one
to one onto themselves: XOR with a key, multiplication by an odd number, XOR of a number with itself
shifted right. A result at or above `length` is hashed again ("cycle walking"), which keeps the map
one to one and takes at most two hashes on average. Finally, the seed is added modulo `length`.
"""

import operator
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from megakit.data.indices import Int, IntArray, as_int_array, as_natural


@overload
def permute(index: Int, length: Int, seed: Int) -> int: ...
@overload
def permute(index: NDArray[Any], length: Int, seed: Int) -> IntArray: ...
def permute(index: Int | NDArray[Any], length: Int, seed: Int) -> int | IntArray:
    """Return the element at a position of a shuffled range, in O(1) time and memory.

    For each length, from 1 to 2**63 - 1, and each seed, the positions [0, length) are mapped one to
    one onto [0, length). Positions may have any shape. A seed is any integer that is not negative.
    """
    length, seed = as_natural(length, least=1), as_natural(seed)
    mask = (1 << (length - 1).bit_length()) - 1
    constants = _constants(seed, mask)
    if isinstance(index, np.ndarray):
        return _permute_array(as_int_array(index), length, seed % length, constants, mask)
    number = operator.index(index)
    _check_index(number, length)
    number = _hash(number, constants, mask)
    while number >= length:
        number = _hash(number, constants, mask)
    return (number + seed) % length


def _permute_array(
    indices: NDArray[Any], length: int, shift: int, constants: list[int], mask: int
) -> IntArray:
    _check_index(indices.min(initial=0), length)
    _check_index(indices.max(initial=0), length)
    # All arithmetic is modulo 2**k, so the width of the word has no effect; 32 bits are faster.
    word = np.uint32 if mask < 2**32 else np.uint64
    words, wide = [word(constant) for constant in constants], word(mask)
    x = _hash(indices.reshape(-1).astype(word), words, wide)
    outside = np.flatnonzero(x > word(length - 1))
    while outside.size:
        x[outside] = _hash(x[outside], words, wide)
        outside = outside[x[outside] > word(length - 1)]
    total = x.astype(np.uint64) + np.uint64(shift)
    # Modulo length: where total < length, the difference wraps around to a huge number.
    permuted = np.minimum(total, total - np.uint64(length)).astype(np.int64)
    return permuted.reshape(indices.shape)


def _constants(seed: int, mask: int) -> list[int]:
    """List the constants of the hash in the order of their use."""
    first = [seed, 0xE170893D, seed >> 16, seed >> 8, 0x0929EB3F, seed >> 23]
    then = [(1 | seed >> 27) * 0x6935FA69, 0x74DCB303, 0x9E501CC3, 0xC860A3DF]
    return [constant & mask for constant in first + then]


def _hash(x: Any, c: list[Any], mask: Any) -> Any:
    """Hash integers in [0, mask] one to one."""
    x = (x ^ c[0]) * c[1] & mask ^ c[2]
    x = (x ^ x >> 4 ^ c[3]) * c[4] & mask ^ c[5]
    x = (x ^ x >> 1) * c[6] & mask
    x = (x ^ x >> 11) * c[7] & mask
    x = (x ^ x >> 2) * c[8] & mask
    return (x ^ x >> 2) * c[9] & mask


def _check_index(index: Any, length: int) -> None:
    if not 0 <= index < length:
        raise ValueError(f"The index to permute must be in the range [0, {length}), got {index}.")
