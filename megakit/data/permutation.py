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

from collections.abc import Callable
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from megakit.data.indices import Int, IntArray, as_int, as_int_array

MAX_LENGTH = 2**63 - 1

# Number of lanes (elements) hashed at a time. A block and one temporary array, 1 MiB in all, fit in
# a core's caches. Smaller blocks are slower, because numpy's cost per call grows; this matters most
# while the last lanes are hashed again.
_BLOCK = 65536

# A step is a function (x, operand, mask) -> x. The augmented assignments change arrays in place and
# rebind ints, so that one definition works for both.
_Step = tuple[Callable[[Any, Any, Any], Any], Any]


def _xor(x: Any, key: Any, mask: Any) -> Any:
    x ^= key
    return x


def _multiply(x: Any, factor: Any, mask: Any) -> Any:
    x *= factor
    x &= mask
    return x


def _fold(x: Any, shift: Any, mask: Any) -> Any:
    x ^= x >> shift
    return x


def _unfold(x: Any, shift: Any, mask: Any) -> Any:
    # (1 + S)(1 + S^2)(1 + S^4)... = 1 + S + S^2 + ..., the inverse of 1 + S over GF(2).
    reach = int(mask).bit_length()
    while shift < reach:
        x ^= x >> shift
        shift = shift + shift
    return x


def _forward_steps(seed: Any, mask: int) -> list[_Step]:
    """List the hash's steps for one seed (an int), or for one seed per lane (uint64 array)."""
    return [
        (_xor, seed & mask),
        (_multiply, 0xE170893D & mask),
        (_xor, seed >> 16 & mask),
        (_fold, 4),
        (_xor, seed >> 8 & mask),
        (_multiply, 0x0929EB3F & mask),
        (_xor, seed >> 23 & mask),
        (_fold, 1),
        (_multiply, (1 | seed >> 27) * 0x6935FA69 & mask),
        (_fold, 11),
        (_multiply, 0x74DCB303 & mask),
        (_fold, 2),
        (_multiply, 0x9E501CC3 & mask),
        (_fold, 2),
        (_multiply, 0xC860A3DF & mask),
    ]


def _inverse_steps(seed: Any, mask: int) -> list[_Step]:
    """List the inverse steps of `_forward_steps`, in reverse order."""
    undo: dict[Any, Callable[[Any], _Step]] = {
        _xor: lambda key: (_xor, key),
        _multiply: lambda factor: (_multiply, _inverse_factor(factor, mask)),
        _fold: lambda shift: (_unfold, shift),
    }
    return [undo[step](operand) for step, operand in reversed(_forward_steps(seed, mask))]


def _inverse_factor(factor: Any, mask: int) -> Any:
    """Invert odd numbers modulo mask + 1, a power of two, by Newton's iteration."""
    inverse = factor  # correct in 3 bits, because the square of an odd number is 1 modulo 8
    for _ in range(5):  # 6, 12, 24, 48, 96 bits
        inverse = inverse * (2 - factor * inverse) & mask
    return inverse


def _mask_of(length: int) -> int:
    """Return 2**k - 1, where k is the number of bits of length - 1."""
    return (1 << (length - 1).bit_length()) - 1


def _apply(steps: list[_Step], x: Any, mask: Any) -> Any:
    for step, operand in steps:
        x = step(x, operand, mask)
    return x


def _walk(
    make_steps: Callable[[Any, int], list[_Step]],
    x: NDArray[np.uint64],
    length: int,
    seed: int | NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Hash a block of lanes; hash lanes again until all are below `length`."""
    mask = _mask_of(length)
    dtype = np.uint32 if mask < 2**32 else np.uint64

    def steps_of(lanes: Any) -> list[_Step]:
        lane_seeds = seed if isinstance(seed, int) else seed[lanes]
        # Operands get the type of the lanes, because numpy is slow with Python's ints.
        return [(step, np.asarray(key, dtype)) for step, key in make_steps(lane_seeds, mask)]

    typed_mask, last = dtype(mask), dtype(length - 1)
    steps = steps_of(slice(None))
    y = _apply(steps, x.astype(dtype), typed_mask)
    outside = np.flatnonzero(y > last)
    while outside.size:
        if not isinstance(seed, int):
            steps = steps_of(outside)
        again = _apply(steps, y[outside], typed_mask)
        y[outside] = again
        outside = outside[again > last]
    wide: NDArray[np.uint64] = y.astype(np.uint64)
    return wide


def _rotate(x: NDArray[np.uint64], by: Any, length: int) -> NDArray[np.uint64]:
    """Return (x + by) % length for x and by below `length`."""
    total = x + np.asarray(by, np.uint64)
    return np.minimum(total, total - np.uint64(length))  # a negative difference wraps to huge


def _map_block(
    x: NDArray[np.uint64], length: int, seed: int | NDArray[np.uint64], inverse: bool
) -> NDArray[np.uint64]:
    if inverse:
        back = (length - seed % length) % length
        return _walk(_inverse_steps, _rotate(x, back, length), length, seed)
    return _rotate(_walk(_forward_steps, x, length, seed), seed % length, length)


def _map_one(x: int, length: int, seed: int, inverse: bool) -> int:
    mask = _mask_of(length)
    steps = _inverse_steps(seed, mask) if inverse else _forward_steps(seed, mask)
    if inverse:
        x = (x - seed) % length
    x = _apply(steps, x, mask)
    while x >= length:
        x = _apply(steps, x, mask)
    return x if inverse else (x + seed) % length


def _map_array(index: Any, length: int, seed: Any, inverse: bool) -> IntArray:
    indices = as_int_array(index, "The indices")
    seeds = None
    if isinstance(seed, np.ndarray):
        indices, seeds = np.broadcast_arrays(indices, as_int_array(seed, "The seeds"))
        _check_seed(int(seeds.min(initial=0)))
        seeds = seeds.reshape(-1).astype(np.uint64)
    else:
        seed = as_int(seed, "The seed")
        _check_seed(seed)
    if indices.size:
        _check_within(int(indices.min()), length)
        _check_within(int(indices.max()), length)

    flat = indices.reshape(-1)
    out = np.empty(flat.size, np.int64)
    for start in range(0, flat.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        block_seed = seed if seeds is None else seeds[block]
        out[block] = _map_block(flat[block].astype(np.uint64), length, block_seed, inverse)
    return out.reshape(indices.shape)


def _map(index: Any, length: Any, seed: Any, inverse: bool) -> int | IntArray:
    length = as_int(length, "The length")
    if not 1 <= length <= MAX_LENGTH:
        raise ValueError(f"The length must be from 1 to 2**63 - 1, got {length}.")
    if isinstance(index, np.ndarray) or isinstance(seed, np.ndarray):
        return _map_array(index, length, seed, inverse)
    index, seed = as_int(index, "The index"), as_int(seed, "The seed")
    _check_within(index, length)
    _check_seed(seed)
    return _map_one(index, length, seed, inverse)


def _check_within(index: int, length: int) -> None:
    if not 0 <= index < length:
        raise ValueError(f"The index must be in [0, {length}), got {index}.")


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise ValueError(f"The seed must not be negative, got {seed}.")


@overload
def permute(index: Int, length: Int, seed: Int) -> int: ...
@overload
def permute(index: NDArray[Any], length: Int, seed: Int | NDArray[Any]) -> IntArray: ...
@overload
def permute(index: Int, length: Int, seed: NDArray[Any]) -> IntArray: ...
def permute(index: Any, length: Any, seed: Any) -> int | IntArray:
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
    return _map(index, length, seed, inverse=False)


@overload
def inverse_permute(index: Int, length: Int, seed: Int) -> int: ...
@overload
def inverse_permute(index: NDArray[Any], length: Int, seed: Int | NDArray[Any]) -> IntArray: ...
@overload
def inverse_permute(index: Int, length: Int, seed: NDArray[Any]) -> IntArray: ...
def inverse_permute(index: Any, length: Any, seed: Any) -> int | IntArray:
    """Return the position of the element `index` in a shuffled range; the inverse of `permute`.

    `inverse_permute(permute(i, n, seed), n, seed) == i`. Use it to find when training used a
    sample. Arguments, result and errors are those of `permute`.
    """
    return _map(index, length, seed, inverse=True)
