"""PRNGResampleDataset: even, independent, the same in any order."""

import numpy as np
import pytest
from scipy.stats import chi2  # type: ignore[import-untyped]

from megakit.data import PRNGResampleDataset, fetch_batch


class Numbers:
    """Any number of samples: their own indices."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index

    def get_batch(self, indices):
        return indices


def drawn(length, count, seed=42, start=0):
    dataset = PRNGResampleDataset(Numbers(length), seed, start + count)
    return dataset.get_batch(np.arange(start, start + count))


def is_even(values, cells):
    """Whether the numbers of values in the cells deviate as random ones, no less and no more."""
    counts = np.bincount(values, minlength=cells)
    expected = counts.sum() / cells
    p_value = chi2.sf(((counts - expected) ** 2 / expected).sum(), cells - 1)
    return 1e-4 < p_value < 1 - 1e-4


@pytest.mark.parametrize(("length", "seed"), [(10, 42), (55_000, 2**100)])
def test_evenness(length, seed):
    assert is_even(drawn(length, 2_000_000, seed), length)


def test_known_values():
    """What any platform and version must give."""
    assert drawn(1000, 6).tolist() == [774, 455, 656, 992, 8, 836]
    # A long range needs all bits of the hash.
    length, start = 10**12 + 39, 2**40
    assert drawn(length, 2, start=start).tolist() == [763360061423, 772095415659]


@pytest.mark.parametrize("length", [1, 3 * 2**61])
def test_any_order_and_any_batch(length):
    dataset = PRNGResampleDataset(Numbers(length), num_samples=500)
    shuffled = np.random.default_rng(0).permutation(500)
    assert fetch_batch(dataset, shuffled).tolist() == [dataset[index] for index in shuffled]
