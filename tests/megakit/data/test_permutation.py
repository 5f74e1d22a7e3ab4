"""permute: one to one at every length, and the values of the reference up to 2**32."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from megakit.data import permute

# From bionemo-core 2.4.5: (length, seed, index, value).
KNOWN = [
    *((10, 42, index, value) for index, value in enumerate([7, 9, 6, 8, 3, 5, 1, 4, 2, 0])),
    (55_000, 44, 54_999, 39_277),
    (2_147_483_659, 123, 1_073_741_829, 417_942_481),
    (4_294_967_291, 77, 4_294_967_290, 3_336_024_032),
    # Seeds that use each of the seed's shifts, below and above 32 and 64 bits.
    (55_000, 6_543_217, 12_345, 32_805),
    (4_294_967_291, 2**31 - 2, 77, 2_864_725_152),
    (55_000, 9_876_543_211, 54_321, 11),
    (60_000, 123_456_789_012_345_678_901_234_567_890, 31, 25_688),
]

around_powers_of_two = st.integers(0, 63).flatmap(
    lambda bits: st.integers(max(1, 2**bits - 3), min(2**63 - 1, 2**bits + 3))
)
lengths = st.one_of(around_powers_of_two, st.integers(1, 2**63 - 1))
seeds = st.one_of(st.integers(0, 2**31 - 1), st.integers(0, 2**200))


@pytest.mark.parametrize(("length", "seed", "index", "value"), KNOWN)
def test_known_values(length, seed, index, value):
    assert permute(index, length, seed) == value
    assert permute(np.array([index]), length, seed).tolist() == [value]


@settings(max_examples=300, deadline=None)
@given(length=lengths, seed=seeds, data=st.data())
def test_different_indices_give_different_values_at_any_length(length, seed, data):
    indices = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20, unique=True))
    values = [permute(index, length, seed) for index in indices]
    assert all(0 <= value < length for value in values)
    assert len(set(values)) == len(values)
    assert permute(np.array(indices, np.int64), length, seed).tolist() == values
