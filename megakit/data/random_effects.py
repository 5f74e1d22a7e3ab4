"""Random effects the right way: random numbers that belong to (seed, epoch, index).

THE pattern for masking, noise, crops, dropped pixels: take the random numbers of a sample from its
seed, epoch and index, and from nothing else. Then every model-parallel rank sees the same sample, a
restart and any number of workers change nothing, and yet each epoch differs. Never call
`torch.manual_seed`, nor draw from torch's, numpy's or random's global generators in a dataset:
Megatron seeds dropout and initial weights through torch's, and shares it with whatever runs in the
same process.

    class DropPixels(MultiEpochDatasetWrapper):
        def apply_transform(self, sample, index):
            rng = sample_generator(seed, index.epoch, index.idx)  # a numpy Generator
            return sample * (rng.random(sample.shape) >= 0.2)

In batches, where one generator per sample would be the slowest part of training, `uniform` and
`bernoulli` give the numbers of all samples at once; alone or in any batch, a sample gets the same.

    def apply_transform(self, sample, index):
        kept = bernoulli(0.8, seed, index.epoch, index.idx, tuple(sample.shape))
        return sample * torch.from_numpy(kept)

    def apply_transform_batch(self, batch, index):
        kept = bernoulli(0.8, seed, index.epoch, index.idx, tuple(batch.shape[1:]))
        return batch * torch.from_numpy(kept)

Give each effect of a sample a seed of its own: equal arguments give equal numbers.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.data.hashing import GOLDEN, absorb, key_of, mix64
from megakit.data.indices import Int, as_int, as_int_array

# Hashes computed at a time, as many as stay in a core's cache of second level.
_BLOCK = 32768


def sample_generator(seed: Int, epoch: Int, index: Int) -> np.random.Generator:
    """Return a random generator for one sample in one epoch; anything numpy can draw, 15 us each.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If one is negative.
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

    A sample's numbers are outputs of SplitMix64 (`megakit.data.hashing`) from a key hashed from the
    three, 24 bits each.

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
    # 24 bits: what a float32 holds exactly.
    return np.asarray(np.multiply(integers >> 8, np.float32(2**-24), dtype=np.float32))


def bernoulli(
    probability: float,
    seed: Int,
    epoch: Int | NDArray[Any],
    index: Int | NDArray[Any],
    shape: tuple[int, ...] = (),
) -> NDArray[np.bool_]:
    """Return for each sample what is true with a probability, from (seed, epoch, index) alone.

    As `uniform` below a threshold would give it, in half the time, from 16 bits for each value.

    Args:
        probability: From 0 to 1; rounded to a multiple of 2**-16.
        seed: Any integer that is not negative.
        epoch: An int, or integers of shape (B,); not negative.
        index: An int, or integers of shape (B,); not negative.
        shape: Shape of one sample's values.

    Returns:
        bool of shape `(B, *shape)`, or `shape` for two ints.

    Raises:
        TypeError: If seed, epoch or index are not integers.
        ValueError: If one is negative, or the probability is none.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"A probability is from 0 to 1, got {probability}.")
    threshold = round(probability * 2**16)
    integers = _integers(seed, epoch, index, shape, "<u2")
    if threshold == 2**16:  # one more than what 16 bits hold
        return np.ones(integers.shape, np.bool_)
    return np.asarray(integers < np.uint16(threshold))


def _integers(
    seed: Int, epoch: Any, index: Any, shape: tuple[int, ...], dtype: str
) -> NDArray[Any]:
    """As many random bits for each value as its type has: (B, *shape)."""
    epochs, indices = np.broadcast_arrays(_words(epoch, "Epochs"), _words(index, "Indices"))
    seed_key = np.uint64(key_of(as_int(seed, "The seed")))
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


def _words(values: Any, name: str) -> NDArray[np.uint64]:
    array = as_int_array(values, name)
    if array.size and array.min() < 0:
        raise ValueError(f"{name} must not be negative, got {array.min()}.")
    return array.astype(np.uint64)
