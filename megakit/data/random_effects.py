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
from megakit.data.indices import EpochIndex, Int, IntArray, as_int_array, as_natural

Ints = Int | NDArray[Any]

# Increment of SplitMix64's counter: 2**64 / golden ratio, rounded to odd.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Factors of SplitMix64's hash.
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Number of hashes computed at a time; they fit in a core's level-2 cache.
_BLOCK = 32768


def sample_generator(seed: Int, epoch: Int, index: Int) -> np.random.Generator:
    """Return a numpy Generator for one sample in one epoch; its construction takes 15 us."""
    entropy, *key = map(as_natural, (seed, epoch, index))
    return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=key))


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
    """Return random numbers of the standard normal distribution for each sample, up to 6.7.

    The arguments and the result's shape are those of `uniform`.
    """
    pairs = _integers(seed, epoch, index, (*shape, 2), "<u4")
    # From 2**-32 to 1: the logarithm of 0 is infinite.
    radius = np.sqrt(-2 * np.log((pairs[..., 0] + 1.0) * 2**-32))
    return np.asarray(radius * np.cos(pairs[..., 1] * (math.tau * 2**-32)), np.float32)


def normal_like(batch: Tensor, seed: Int, index: EpochIndex[IntArray]) -> Tensor:
    """Return `normal` for each value of a batch: float32, of the batch's shape, on its device."""
    return on_device(normal(seed, *index, tuple(batch.shape[1:])), like=batch)


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
        values[start : start + rows] = hashes.view(dtype)[:, :num_values]
    return values.reshape((*np.broadcast_shapes(np.shape(epoch), np.shape(index)), *shape))


def _keys(seed: Int, epoch: Ints, index: Ints) -> NDArray[np.uint64]:
    """Return a start state of SplitMix64 for each sample, (B,)."""
    words = (as_int_array(values).astype(np.uint64) for values in (epoch, index))
    epochs, indices = map(np.ravel, np.broadcast_arrays(*words))
    keys = mix64((np.uint64(key_of(as_natural(seed))) ^ epochs) + GOLDEN)
    return mix64((keys ^ indices) + GOLDEN)


@lru_cache(maxsize=64)
def key_of(seed: int) -> int:
    """Convert a seed of any size to a key of 64 bits: a start state of SplitMix64.

    Numpy guarantees that SeedSequence does not change between versions.
    """
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])


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
    golden, *factors = (word - (1 << 64) for word in (int(GOLDEN), *_FACTORS))
    keys = on_device(_keys(seed, *index).view(np.int64), like=batch)
    z = keys[:, None] + torch.arange(1, number + 1, device=keys.device) * golden
    for shift, factor in zip((30, 27, 31), (*factors, 1), strict=True):
        z ^= (z >> shift) & (1 << 64 - shift) - 1
        z *= factor
    return z
