"""Whole numbers of slots for weights, and their assignment: nearest shares, even prefixes."""

import numpy as np
import pytest

from megakit.data.assignment import assign, whole_weights


def test_known_assignments():
    assert assign([1]).tolist() == [0]
    assert assign([1, 1]).tolist() == [0, 1]
    assert assign([3, 1]).tolist() == [0, 0, 1, 0]
    assert assign([7, 2, 1]).tolist() == [0, 0, 1, 0, 0, 2, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([9999, 1], [9999, 1]),
    ],
)
def test_known_counts(weights, counts):
    assert whole_weights(weights).tolist() == counts


def test_many_members():
    weights = np.random.default_rng(0).random(300) + 0.1
    counts = whole_weights(weights.tolist())
    assert np.abs(counts / counts.sum() - weights / weights.sum()).max() < 0.5 / 9000
