"""The multi-epoch datasets: orders, transforms, and batches that equal samples."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import Dataset, Subset

from megakit.data import (
    EpochIndex,
    MultiEpochDatasetResampler,
    MultiEpochDatasetWrapper,
    fetch_batch,
)
from megakit.testing import assert_dataset_compatible_with_megatron


class Indices(Dataset):
    """Gives back the EpochIndex that it is asked for."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Virtual(Indices):
    """Any number of samples, each its own index; batches too."""

    def get_batch(self, indices):
        return torch.from_numpy(indices)


class AddEpoch(MultiEpochDatasetWrapper):
    """A transform written for samples only."""

    def apply_transform(self, sample, index):
        return sample + 1000 * index.epoch


class AddEpochBatched(AddEpoch):
    """The same one, written for batches too."""

    def apply_transform_batch(self, batch, index):
        return batch + 1000 * torch.from_numpy(index.epoch)


class AddMore(AddEpochBatched):
    """Changes what is done to samples, but inherits what is done to batches."""

    def apply_transform(self, sample, index):
        return super().apply_transform(sample, index) + 7


def order(length, **arguments):
    resampler = MultiEpochDatasetResampler(Indices(length), **arguments)
    return [resampler[index] for index in range(len(resampler))]


def test_reference_order():
    """From bionemo-core 2.4.5."""
    expected = [(0, i) for i in (6, 3, 0, 2, 5, 4, 1)] + [(1, i) for i in (3, 6, 1, 4, 2)]
    found = order(7, num_epochs=3)
    assert found[:12] == expected
    assert all(type(value) is int for pair in found for value in pair)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 300), st.booleans(), st.data())
def test_batches_equal_samples_in_any_order(length, num_samples, shuffle, data):
    """And each epoch has each sample once."""
    dataset = AddEpochBatched(Virtual(length))
    resampler = MultiEpochDatasetResampler(dataset, num_samples=num_samples, shuffle=shuffle)
    found = [resampler[index] for index in range(num_samples)]
    for epoch in range(num_samples // length):
        part = [sample - 1000 * epoch for sample in found[epoch * length :][:length]]
        assert (sorted(part) if shuffle else part) == list(range(length))
    indices = data.draw(st.lists(st.integers(0, num_samples - 1), min_size=1, max_size=40))
    assert resampler.get_batch(np.array(indices)).tolist() == [found[i] for i in indices]


@pytest.mark.parametrize("wrapper", [AddEpoch, AddEpochBatched, AddMore])
def test_transforms_of_samples_and_batches(wrapper):
    dataset = wrapper(Virtual(10))
    index = EpochIndex(np.array([0, 2, 1]), np.array([3, 3, 9]))
    singles = [dataset[EpochIndex(0, 3)], dataset[EpochIndex(2, 3)], dataset[EpochIndex(1, 9)]]
    assert dataset.get_batch(index).tolist() == singles
    assert_dataset_compatible_with_megatron(MultiEpochDatasetResampler(dataset, num_epochs=3))


class Batched(Virtual):
    """Counts its batches."""

    calls = 0

    def get_batch(self, indices):
        self.calls += 1
        return super().get_batch(indices)


def test_a_subset_is_fetched_as_one_batch():
    dataset = Batched(20)
    outer: Any = Subset(dataset, [7, 3, 3, 18, 0])
    assert fetch_batch(Subset(outer, [4, 0, 1]), np.array([2, 0, 0])).tolist() == [3, 0, 0]
    assert dataset.calls == 1
    outer.indices = [1, 2]
    assert fetch_batch(outer, np.array([1])).tolist() == [2]


class Changed(Virtual):
    """Changes samples, but inherits a get_batch that knows nothing of it."""

    def __getitem__(self, index):
        return -index


class Shifted(Subset):
    def __getitem__(self, index):
        return super().__getitem__(index) + 100

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_what_a_subclass_changes_counts():
    assert fetch_batch(Changed(20), np.array([4, 5])).tolist() == [-4, -5]
    assert fetch_batch(Shifted(Virtual(20), [1, 2]), np.array([1])).tolist() == [102]
