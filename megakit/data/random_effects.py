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

In batches, where one generator per sample would be the slowest part of training, `uniform` gives
the numbers of all samples at once; alone or in any batch, a sample gets the same ones.

    def apply_transform(self, sample, index):
        numbers = uniform(seed, index.epoch, index.idx, tuple(sample.shape))
        return sample * torch.from_numpy(numbers >= 0.2)

    def apply_transform_batch(self, batch, index):
        numbers = uniform(seed, index.epoch, index.idx, tuple(batch.shape[1:]))
        return batch * torch.from_numpy(numbers >= 0.2)

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
        float32 in [0, 1), multiples of 2**-24, of shape (B, *shape), or `shape` for two ints.

    Raises:
        TypeError: If seed, epoch or index are not integers.
        ValueError: If one is negative.
    """
    epochs, indices = np.broadcast_arrays(_words(epoch, "Epochs"), _words(index, "Indices"))
    seed_key = np.uint64(key_of(as_int(seed, "The seed")))
    keys = absorb(absorb(seed_key, epochs.reshape(-1)), indices.reshape(-1))
    num_values = math.prod(shape)
    # Each hash of 64 bits makes two values.
    steps = np.arange(1, (num_values + 1) // 2 + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    values = np.empty((keys.size, num_values), np.float32)
    rows = max(1, _BLOCK // max(1, steps.size))
    for start in range(0, keys.size, rows):
        hashes = mix64(keys[start : start + rows, None] + steps)
        halves = hashes.astype("<u8", copy=False).view("<u4")[:, :num_values]
        values[start : start + rows] = halves >> 8  # 24 bits: what a float32 holds exactly
    values *= np.float32(2**-24)
    return values.reshape((*epochs.shape, *shape))


def _words(values: Any, name: str) -> NDArray[np.uint64]:
    array = as_int_array(values, name)
    if array.size and array.min() < 0:
        raise ValueError(f"{name} must not be negative, got {array.min()}.")
    return array.astype(np.uint64)
