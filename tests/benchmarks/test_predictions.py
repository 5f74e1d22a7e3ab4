"""Predictions take the same memory for any number of samples."""

from typing import Any

import pytest


@pytest.mark.long
def test_memory_of_a_whole_prediction_does_not_grow(benchmark: Any) -> None:
    few, many = benchmark("predictions").measure([10_000, 300_000]).values()
    assert many["file"] > 20 * few["file"]
    assert many["megabytes"] < few["megabytes"] + 40
