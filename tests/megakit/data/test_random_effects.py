"""Random effects: even numbers that belong to (seed, epoch, index), alone and in batches."""

import numpy as np
import pytest
import torch
from scipy.stats import kstest  # type: ignore[import-untyped]

from megakit.data import (
    EpochIndex,
    MultiEpochDatasetResampler,
    MultiEpochDatasetWrapper,
    fetch_batch,
    sample_generator,
    uniform,
)
from megakit.testing import (
    assert_dataset_compatible_with_megatron,
    assert_dataset_elements_not_equal,
)


class DropPixels(MultiEpochDatasetWrapper):
    """The documented pattern, for samples and for batches."""

    def apply_transform(self, sample, index):
        return sample * torch.from_numpy(
            uniform(1, index.epoch, index.idx, tuple(sample.shape)) >= 0.2
        )

    def apply_transform_batch(self, batch, index):
        return batch * torch.from_numpy(
            uniform(1, index.epoch, index.idx, tuple(batch.shape[1:])) >= 0.2
        )


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index >= 40:
            raise IndexError(index)
        return torch.ones(1, 28, 27) * (index + 1)


def test_the_pattern():
    dataset = DropPixels(Images())
    assert_dataset_elements_not_equal(dataset, EpochIndex(0, 5), EpochIndex(1, 5))
    resampler = MultiEpochDatasetResampler(dataset, num_epochs=3)
    assert_dataset_compatible_with_megatron(resampler)
    batch = fetch_batch(resampler, np.arange(120))
    kept = (batch != 0).float().mean(dim=(1, 2, 3))
    assert abs(kept.mean() - 0.8) < 0.005
    assert kept.min() > 0.7


@pytest.mark.parametrize("shape", [(), (1,), (5,), (28, 28), (3, 0), (70_001,)])
def test_equal_in_a_batch_and_alone(shape):
    epochs, indices = np.array([0, 0, 3, 10**6]), np.array([0, 1, 1, 10**12])
    batch = uniform(42, epochs, indices, shape)
    assert batch.shape == (4, *shape)
    assert batch.dtype == np.float32
    for row in range(4):
        alone = uniform(42, int(epochs[row]), int(indices[row]), shape)
        assert alone.shape == shape
        np.testing.assert_array_equal(alone, batch[row])
    np.testing.assert_array_equal(uniform(42, epochs[::-1], indices[::-1], shape), batch[::-1])
    np.testing.assert_array_equal(uniform(42, 0, np.array([0, 1]), shape), batch[:2])


def test_many_rows_are_cut_without_a_trace():
    rows = np.arange(1000)
    np.testing.assert_array_equal(
        uniform(1, rows, rows, (100,))[[0, 655, 656, 999]],
        uniform(1, rows[[0, 655, 656, 999]], rows[[0, 655, 656, 999]], (100,)),
    )


def test_known_values():
    """What any platform and version must give."""
    np.testing.assert_array_equal(uniform(42, 1, 2, (3,)) * 2**24, [2498672, 13011025, 2052551])
    np.testing.assert_allclose(sample_generator(42, 1, 2).random(), 0.5840890785571974, rtol=1e-12)


def test_even_in_every_direction():
    """Along a sample, over samples, over epochs, over seeds."""
    along = uniform(3, 0, 0, (100_000,))
    over_samples = uniform(3, 0, np.arange(100_000), ())
    over_epochs = uniform(3, np.arange(100_000), 0, ())
    over_seeds = np.array([uniform(seed, 0, 0) for seed in range(10_000)])
    for values in (along, over_samples, over_epochs, over_seeds):
        assert values.min() >= 0
        assert values.max() < 1
        assert 1e-3 < kstest(values, "uniform").pvalue < 1 - 1e-3


def test_rows_and_columns_are_uncorrelated():
    values = uniform(3, np.repeat(np.arange(4), 250), np.tile(np.arange(250), 4), (200,))
    for table in (values, values.T):
        correlations = np.corrcoef(table)[np.triu_indices(len(table), 1)]
        size = table.shape[1]
        assert np.abs(correlations).max() < 6 / size**0.5
        assert abs(correlations.std() * size**0.5 - 1) < 0.05


def test_generators_differ_by_each_number():
    numbers = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0), (0, 0, 2**32)]
    draws = [sample_generator(*three).random() for three in numbers]
    assert len(set(draws)) == len(draws)
    assert (
        sample_generator(2**32, np.int64(3), 4).random() == sample_generator(2**32, 3, 4).random()
    )


@pytest.mark.parametrize("numbers", [(-1, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_negative_numbers(numbers):
    for function in (sample_generator, uniform):
        with pytest.raises(ValueError, match="must not be negative"):
            function(*numbers)


@pytest.mark.parametrize("numbers", [(0.5, 0, 0), (0, 1.0, 0), (0, 0, True)])
def test_other_numbers(numbers):
    for function in (sample_generator, uniform):
        with pytest.raises(TypeError, match="integer"):
            function(*numbers)
