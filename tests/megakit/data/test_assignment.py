"""Whole numbers of slots for weights, and their assignment: nearest shares, even prefixes."""

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakit.data.assignment import MAX_SLOTS, assign, whole_weights

counts_lists = st.lists(st.integers(1, 300), min_size=1, max_size=12)


@settings(deadline=None)
@given(counts_lists)
def test_each_prefix_is_within_tijdemans_bound(counts):
    """In whole numbers: the difference, times total and denominator of the bound."""
    members, total = assign(counts), sum(counts)
    assert np.bincount(members, minlength=len(counts)).tolist() == counts
    slots = np.arange(1, total + 1)
    denominator = max(2, 2 * len(counts) - 2)
    for member, count in enumerate(counts):
        drawn = np.cumsum(members == member)
        assert np.abs(drawn * total - slots * count).max() * denominator <= total * (
            denominator - 1
        )


def test_known_assignments():
    assert assign([1]).tolist() == [0]
    assert assign([1, 1]).tolist() == [0, 1]
    assert assign([3, 1]).tolist() == [0, 0, 1, 0]
    assert assign([7, 2, 1]).tolist() == [0, 0, 1, 0, 0, 2, 0, 0, 1, 0]
    assert len(assign([1] * MAX_SLOTS)) == MAX_SLOTS


@settings(deadline=None, max_examples=60)
@given(counts_lists, st.floats(1e-300, 1e300))
def test_shares_with_a_small_denominator_are_exact(counts, scale):
    lowest = [count // math.gcd(*counts) for count in counts]
    assert whole_weights([count * scale for count in counts]).tolist() == lowest
    assert whole_weights(counts).tolist() == lowest
    fractions: Any = [Fraction(count, 7**300) for count in counts]
    assert whole_weights(fractions).tolist() == lowest


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1 / 3, 2 / 3], [1, 2]),
        (np.array([0.7, 0.3], np.float32), [7, 3]),
        ([1e308, 1e308, 1e308], [1, 1, 1]),
        ([10**300, 3 * 10**300], [1, 3]),
        ([5e-324], [1]),
        ([9999, 1], [9999, 1]),
    ],
)
def test_known_counts(weights, counts):
    assert whole_weights(weights).tolist() == counts


@settings(deadline=None, max_examples=15)
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=3))
def test_no_total_gives_nearer_shares(weights):
    """Against every total, with every way to round the shares up or down."""
    shares = np.array(weights) / math.fsum(weights)
    counts = whole_weights(weights)
    assert counts.min() >= 1
    error = np.abs(counts / counts.sum() - shares).max()
    totals = np.arange(1, MAX_SLOTS + 1)
    floors = np.floor(totals[:, None] * shares).astype(int)
    for up in itertools.product([0, 1], repeat=len(weights)):
        tried = floors + up
        valid = (tried.sum(axis=1) == totals) & (tried.min(axis=1) >= 1)
        errors = np.abs(tried / totals[:, None] - shares).max(axis=1)
        assert errors[valid].min(initial=1) >= error - 1e-13
        # No smaller total is as good.
        assert not (valid & (errors <= error - 1e-13) & (totals < counts.sum())).any()


def test_many_members():
    assert whole_weights([1.0] * MAX_SLOTS).tolist() == [1] * MAX_SLOTS
    weights = np.random.default_rng(0).random(300) + 0.1
    counts = whole_weights(weights.tolist())
    assert np.abs(counts / counts.sum() - weights / weights.sum()).max() < 0.5 / 9000


@pytest.mark.parametrize("weights", [[10_000, 1], [1.0] * (MAX_SLOTS + 1), [1e300, 1e-300]])
def test_a_share_below_one_slot(weights):
    with pytest.raises(ValueError, match=r"The smallest possible share is 1/10000\. Increase"):
        whole_weights(weights)
