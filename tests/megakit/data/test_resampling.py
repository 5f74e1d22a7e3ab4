"""PRNGResampleDataset: even, independent, the same in any order; errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2  # type: ignore[import-untyped]

from megakit.data import PRNGResampleDataset, fetch_batch
from megakit.data.resampling import _high_word, draw
from megakit.testing import assert_dataset_compatible_with_megatron


def counters(count):
    return np.arange(count, dtype=np.uint64)


def p_value(counts):
    """How likely counts at least this uneven are, if all cells are equally likely."""
    expected = counts.sum() / counts.size
    return chi2.sf(((counts - expected) ** 2 / expected).sum(), counts.size - 1)


# A dozen tests on fixed numbers: each p-value is what it is for ever, and none may be absurd, on
# either side. Counts that are too even would be as wrong as uneven ones.
@pytest.mark.parametrize("seed", [42, 2**100])
@pytest.mark.parametrize("length", [10, 55_000])
def test_evenness(seed, length):
    drawn = PRNGResampleDataset(range(length), seed, 2_000_000)._draw(np.arange(2_000_000))
    assert 1e-4 < p_value(np.bincount(drawn, minlength=length)) < 1 - 1e-4


def test_neighbours_are_independent():
    """Pairs of successive draws, draws 1024 apart, and the same draw of neighbouring seeds."""
    first = PRNGResampleDataset(range(50), 7, 1_000_000)._draw(np.arange(1_000_000))
    other = PRNGResampleDataset(range(50), 8, 1_000_000)._draw(np.arange(1_000_000))
    pairs = [(first[:-1], first[1:]), (first[:-1024], first[1024:]), (first, other)]
    for left, right in pairs:
        assert 1e-4 < p_value(np.bincount(left * 50 + right, minlength=2500)) < 1 - 1e-4


def test_low_bits_are_even_where_the_range_is_large():
    drawn = draw(123, counters(1_000_000), 10**12)
    assert 1e-4 < p_value(np.bincount(drawn % 1000, minlength=1000)) < 1 - 1e-4
    assert 1e-4 < p_value(np.bincount(drawn // 10**9, minlength=1000)) < 1 - 1e-4


def test_no_bias_where_it_would_be_large():
    """Over 3/4 of 2**64 a plain multiplication would favour a third of the numbers by 2 to 1."""
    length = 3 * 2**61
    drawn = draw(5, counters(600_000), length)
    assert 1e-4 < p_value(np.bincount(drawn % 3, minlength=3)) < 1 - 1e-4
    assert 1e-4 < p_value(np.bincount(drawn // 2**61, minlength=3)) < 1 - 1e-4


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 2**63 - 1), st.integers(0, 2**63 - 9))
def test_a_draw_does_not_depend_on_the_others(key, length, start):
    indices = np.arange(start, start + 8).astype(np.uint64)
    together = draw(key, indices, length)
    assert together.tolist() == [int(draw(key, indices[i : i + 1], length)[0]) for i in range(8)]
    assert 0 <= together.min() <= together.max() < length
    assert _high_word(indices, length).tolist() == [(start + i) * length >> 64 for i in range(8)]


def test_known_values():
    """What any platform and version must give; the first are SplitMix64's published outputs."""
    from megakit.data.hashing import stream

    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [stream(1234567, counter) for counter in range(3)] == outputs
    assert stream(np.uint64(1234567), counters(3)).tolist() == outputs
    drawn = [PRNGResampleDataset(range(1000))[index] for index in range(6)]
    assert drawn == [774, 455, 656, 992, 8, 836]


def test_any_order_and_any_batch():
    dataset = PRNGResampleDataset(range(1000), num_samples=5000)
    expected = [dataset[index] for index in range(5000)]
    assert [dataset[index] for index in reversed(range(5000))] == expected[::-1]
    assert dataset.__getitems__([4999, 0]) == [expected[4999], expected[0]]
    shuffled = np.random.default_rng(0).permutation(5000)
    for batch in np.split(shuffled, [1, 50, 3000]):
        assert fetch_batch(dataset, batch).tolist() == [expected[index] for index in batch]
    assert_dataset_compatible_with_megatron(dataset)


def test_arguments():
    dataset = PRNGResampleDataset(range(7))
    assert (dataset.seed, dataset.num_samples, len(dataset)) == (42, 7, 7)
    assert len(PRNGResampleDataset(range(7), num_samples=20)) == 20
    assert PRNGResampleDataset(["only"])[0] == "only"
    with pytest.raises(ValueError, match="dataset is empty"):
        PRNGResampleDataset([])
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        PRNGResampleDataset(range(7), num_samples=0)
    with pytest.raises(ValueError, match="seed must be greater than or equal to 0"):
        PRNGResampleDataset(range(7), seed=-1)


@pytest.mark.parametrize("index", [7, -1])
def test_out_of_bounds(index):
    with pytest.raises(IndexError, match="out of bounds"):
        PRNGResampleDataset(range(7))[index]
    with pytest.raises(IndexError, match="out of bounds"):
        PRNGResampleDataset(range(7)).get_batch(np.array([0, index]))
