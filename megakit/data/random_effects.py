"""Draws random numbers for random effects of samples, from (seed, epoch, index) only.

Compute the random numbers of a sample from seed, epoch and index, and from nothing else. Then all
ranks of a model replica get equal samples, restarts and the number of workers have no effect, and
epochs differ. In a dataset, never draw from the global generators of torch, numpy or random:
Megatron draws dropout and initial weights from torch's global generator. If a sample has several
random effects, use a different seed for each: equal arguments give equal numbers.

    def apply_transform(self, sample, index):
        rng = sample_generator(seed, index.epoch, index.idx)  # a numpy Generator
        return sample * (rng.random(sample.shape) >= 0.2)

For batches, one generator per sample would be the slowest part of training. `uniform`, `normal` and
`bernoulli` compute the numbers of all samples at once; a sample gets the same numbers alone.

    def apply_transform_batch(self, batch, index):
        return batch * bernoulli_like(batch, 0.8, seed, index)

The numbers are outputs of SplitMix64 (Guy Steele, Doug Lea, Christine Flood, "Fast Splittable
Pseudorandom Number Generators", OOPSLA 2014), which hashes a counter. So every output takes the
same time, in any order, and is equal on every platform. It passes TestU01's BigCrush.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakit.data.device import on_device
from megakit.data.indices import EpochIndex, Int, IntArray, as_int_array, as_seed

Ints = Int | NDArray[Any]

# Increment of SplitMix64's counter: 2**64 / golden ratio, rounded to odd.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Factors of SplitMix64's hash.
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Number of hashes computed at a time; they fit in a core's level-2 cache.
_BLOCK = 32768


def sample_generator(seed: Int, epoch: Int, index: Int) -> np.random.Generator:
    """Return a numpy Generator for one sample in one epoch; its construction takes 15 us."""
    epoch_and_index = as_seed(epoch, "The epoch"), as_seed(index, "The index")
    return np.random.default_rng(np.random.SeedSequence(as_seed(seed), spawn_key=epoch_and_index))


def uniform(
    seed: Int, epoch: Ints, index: Ints, shape: tuple[int, ...] = ()
) -> NDArray[np.float32]:
    """Return uniform random numbers for each sample, from (seed, epoch, index) alone.

    Args:
        seed: Any integer that is not negative.
        epoch: An int, or integers of shape (B,); not negative.
        index: An int, or integers of shape (B,); not negative.
        shape: Shape of one sample's numbers.

    Returns:
        float32 in [0, 1), multiples of 2**-24, of shape `(B, *shape)`, or `shape` for two ints.
    """
    integers = _integers(seed, epoch, index, shape, "<u4")
    # A float32 represents 24 bits exactly.
    return np.asarray(np.multiply(integers >> 8, np.float32(2**-24), dtype=np.float32))


def normal(seed: Int, epoch: Ints, index: Ints, shape: tuple[int, ...] = ()) -> NDArray[np.float32]:
    """Return random numbers of the standard normal distribution for each sample.

    The arguments and the result's shape are those of `uniform`.
    """
    pairs = _integers(seed, epoch, index, (*shape, 2), "<u4")
    return np.asarray(_box_muller(np, *np.moveaxis(pairs, -1, 0)), np.float32)


def normal_like(batch: Tensor, seed: Int, index: EpochIndex[IntArray]) -> Tensor:
    """Return `normal` for each value of a batch: float32, of the batch's shape, on its device.

    A GPU's numbers may differ from a CPU's by rounding in float32.
    """
    if batch.device.type == "cpu":
        return torch.from_numpy(normal(seed, *index, tuple(batch.shape[1:])))
    hashes = _hashes_on_gpu(batch, seed, index, batch[0].numel())
    halves = ((hashes >> bits & 0xFFFFFFFF).double() for bits in (0, 32))
    return _box_muller(torch, *halves).float().view(batch.shape)


def _box_muller(library: Any, low: Any, high: Any) -> Any:
    """Return normal numbers in float64, of at most 6.7, from pairs of integers below 2**32.

    Args:
        library: numpy or torch, whichever has the integers.
        low: The integers that determine the distance from 0.
        high: The integers that determine the sign.
    """
    # From 2**-32 to 1: the logarithm of 0 is infinite.
    radius = library.sqrt(-2 * library.log((low + 1.0) * 2**-32))
    return radius * library.cos(high * (math.tau * 2**-32))


def bernoulli(
    probability: float, seed: Int, epoch: Ints, index: Ints, shape: tuple[int, ...] = ()
) -> NDArray[np.bool_]:
    """Return random booleans for each sample: `uniform(...) < probability` in half the time.

    The probability of True is from 0 to 1, and rounded to a multiple of 2**-16. The other arguments
    are those of `uniform`.
    """
    limit = _limit(probability)
    return np.asarray(_integers(seed, epoch, index, shape, "<u2") < limit)


def bernoulli_like(
    batch: Tensor, probability: float, seed: Int, index: EpochIndex[IntArray]
) -> Tensor:
    """Return `bernoulli` for each value of a batch: bool, of the batch's shape, on its device.

    A GPU computes the same booleans as a CPU; 8 bytes for each sample are sent.
    """
    if batch.device.type == "cpu":
        return torch.from_numpy(bernoulli(probability, seed, *index, tuple(batch.shape[1:])))
    limit, num_values = _limit(probability), batch[0].numel()
    hashes = _hashes_on_gpu(batch, seed, index, -(-num_values // 4))
    parts = hashes.view(torch.int16)[:, :num_values]
    # torch has few operations for unsigned integers.
    return ((parts.int() & 0xFFFF) < limit).view(batch.shape)


def _limit(probability: float) -> int:
    """Return the limit below which a random integer of 16 bits counts as True."""
    if not 0 <= probability <= 1:
        raise ValueError(f"A probability is from 0 to 1, got {probability}.")
    return round(probability * 2**16)


def _integers(
    seed: Int, epoch: Ints, index: Ints, shape: tuple[int, ...], dtype: str
) -> NDArray[Any]:
    """Return random integers of the given dtype, (B, *shape), with all bits random."""
    keys = _keys(seed, epoch, index)
    num_values, values_per_hash = math.prod(shape), 8 // np.dtype(dtype).itemsize
    num_hashes = -(-num_values // values_per_hash)
    steps = np.arange(1, num_hashes + 1, dtype=np.uint64) * GOLDEN
    values = np.empty((keys.size, num_values), dtype)
    rows = max(1, _BLOCK // max(1, num_hashes))
    for start in range(0, keys.size, rows):
        hashes = mix64(keys[start : start + rows, None] + steps)
        parts = hashes.astype("<u8", copy=False).view(dtype)
        values[start : start + rows] = parts[:, :num_values]
    return values.reshape((*np.broadcast_shapes(np.shape(epoch), np.shape(index)), *shape))


def _keys(seed: Int, epoch: Ints, index: Ints) -> NDArray[np.uint64]:
    """Return a start state of SplitMix64 for each sample, (B,)."""
    epochs, indices = np.broadcast_arrays(_words(epoch, "Epochs"), _words(index, "Indices"))
    keys = np.uint64(key_of(as_seed(seed))) ^ epochs.reshape(-1)
    return mix64((mix64(keys + GOLDEN) ^ indices.reshape(-1)) + GOLDEN)


def _words(values: Ints, name: str) -> NDArray[np.uint64]:
    array = as_int_array(values, name)
    if array.min(initial=0) < 0:
        raise ValueError(f"{name} must not be negative, got {array.min()}.")
    return array.astype(np.uint64)


@lru_cache(maxsize=64)
def key_of(seed: int) -> int:
    """Convert a seed of any size to a key of 64 bits: a start state of SplitMix64.

    Numpy guarantees that SeedSequence does not change between versions.
    """
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])


def stream(key: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the outputs with these numbers, from 0, of SplitMix64 from a key."""
    return mix64(np.uint64(key) + (counters + np.uint64(1)) * GOLDEN)


def mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64 bits to 64 bits, one to one ("mix13" by David Stafford), in place."""
    z ^= z >> np.uint64(30)
    z *= np.uint64(_FACTORS[0])
    z ^= z >> np.uint64(27)
    z *= np.uint64(_FACTORS[1])
    z ^= z >> np.uint64(31)
    return z


def _hashes_on_gpu(batch: Tensor, seed: Int, index: EpochIndex[IntArray], number: int) -> Tensor:
    """Return the first outputs of SplitMix64 for each sample, int64 (B, number), like `mix64`.

    Signed integers have the bits of unsigned ones in sums and products; after a shift, the upper
    bits are the sign's.
    """

    def signed(word: int) -> int:
        return word - (1 << 64) if word >= 1 << 63 else word

    keys = on_device(_keys(seed, *index).view(np.int64), like=batch)
    z = keys[:, None] + torch.arange(1, number + 1, device=keys.device) * signed(int(GOLDEN))
    z ^= (z >> 30) & (1 << 34) - 1
    z *= signed(_FACTORS[0])
    z ^= (z >> 27) & (1 << 37) - 1
    z *= signed(_FACTORS[1])
    z ^= (z >> 31) & (1 << 33) - 1
    return z
