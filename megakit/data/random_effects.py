"""Draws random numbers for random effects of samples, from (seed, epoch, index) only.

Compute the random numbers of a sample from seed, epoch and index, and from nothing else. Then all
ranks of a model replica get equal samples, restarts and the number of workers have no effect, and
epochs differ. In a dataset, never draw from the global generators of torch, numpy or random:
Megatron draws dropout and initial weights from torch's global generator. If a sample has several
random effects, use a different seed for each: equal arguments give equal numbers.

    def apply_transform(self, sample, index):
        rng = sample_generator(seed, index.epoch, index.idx)  # a numpy Generator
        return sample * (rng.random(sample.shape) >= 0.2)

For batches, one generator per sample would be the slowest part of training. `uniform` and
`bernoulli` compute the numbers of all samples at once; a sample gets the same numbers alone.

    def apply_transform_batch(self, batch, index):
        kept = bernoulli(0.8, seed, index.epoch, index.idx, tuple(batch.shape[1:]))
        return batch * on_device(kept, like=batch)
"""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megakit.data.hashing import GOLDEN, absorb, key_of, mix64
from megakit.data.indices import Int, as_int, as_int_array, as_seed

# Number of hashes computed at a time; they fit in a core's level-2 cache.
_BLOCK = 32768


def sample_generator(seed: Int, epoch: Int, index: Int) -> np.random.Generator:
    """Return a numpy Generator for one sample in one epoch; its construction takes 15 us.

    Raises:
        TypeError: If an argument is not an integer.
        ValueError: If an argument is negative.
    """
    numbers = [as_int(value, "Seed, epoch and index each") for value in (seed, epoch, index)]
    if min(numbers) < 0:
        raise ValueError(f"Seed, epoch and index must not be negative, got {numbers}.")
    return np.random.default_rng(np.random.SeedSequence(numbers[0], spawn_key=numbers[1:]))


def uniform(
    seed: Int,
    epoch: Int | NDArray[Any],
    index: Int | NDArray[Any],
    shape: tuple[int, ...] = (),
) -> NDArray[np.float32]:
    """Return uniform random numbers for each sample, from (seed, epoch, index) alone.

    A sample's numbers are 24-bit parts of outputs of SplitMix64 (`megakit.data.hashing`). The key
    is a hash of seed, epoch and index.

    Args:
        seed: Any integer that is not negative.
        epoch: An int, or integers of shape (B,); not negative.
        index: An int, or integers of shape (B,); not negative.
        shape: Shape of one sample's numbers.

    Returns:
        float32 in [0, 1), multiples of 2**-24, of shape `(B, *shape)`, or `shape` for two ints.

    Raises:
        TypeError: If seed, epoch or index are not integers.
        ValueError: If one is negative.
    """
    integers = _integers(seed, epoch, index, shape, "<u4")
    # A float32 represents 24 bits exactly.
    return np.asarray(np.multiply(integers >> 8, np.float32(2**-24), dtype=np.float32))


def bernoulli(
    probability: float,
    seed: Int,
    epoch: Int | NDArray[Any],
    index: Int | NDArray[Any],
    shape: tuple[int, ...] = (),
) -> NDArray[np.bool_]:
    """Return random booleans for each sample: `uniform(...) < probability` in half the time.

    Args:
        probability: Probability of True, from 0 to 1; rounded to a multiple of 2**-16.
        seed: Any integer that is not negative.
        epoch: An int, or integers of shape (B,); not negative.
        index: An int, or integers of shape (B,); not negative.
        shape: Shape of one sample's values.

    Returns:
        bool of shape `(B, *shape)`, or `shape` for two ints.

    Raises:
        TypeError: If seed, epoch or index are not integers.
        ValueError: If one of them is negative, or the probability is not in [0, 1].
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"A probability is from 0 to 1, got {probability}.")
    threshold = round(probability * 2**16)
    integers = _integers(seed, epoch, index, shape, "<u2")
    if threshold == 2**16:  # does not fit in 16 bits
        return np.ones(integers.shape, np.bool_)
    return np.asarray(integers < np.uint16(threshold))


def _integers(
    seed: Int, epoch: ArrayLike, index: ArrayLike, shape: tuple[int, ...], dtype: str
) -> NDArray[Any]:
    """Return random integers of the given dtype, (B, *shape), with all bits random."""
    epochs, indices = np.broadcast_arrays(_words(epoch, "Epochs"), _words(index, "Indices"))
    seed_key = np.uint64(key_of(as_seed(seed)))
    keys = absorb(absorb(seed_key, epochs.reshape(-1)), indices.reshape(-1))
    num_values, values_per_hash = math.prod(shape), 8 // np.dtype(dtype).itemsize
    num_hashes = -(-num_values // values_per_hash)
    steps = np.arange(1, num_hashes + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    values = np.empty((keys.size, num_values), dtype)
    rows = max(1, _BLOCK // max(1, num_hashes))
    for start in range(0, keys.size, rows):
        hashes = mix64(keys[start : start + rows, None] + steps)
        parts = hashes.astype("<u8", copy=False).view(dtype)
        values[start : start + rows] = parts[:, :num_values]
    return values.reshape((*epochs.shape, *shape))


def _words(values: ArrayLike, name: str) -> NDArray[np.uint64]:
    array = as_int_array(values, name)
    if array.size and array.min() < 0:
        raise ValueError(f"{name} must not be negative, got {array.min()}.")
    return array.astype(np.uint64)
