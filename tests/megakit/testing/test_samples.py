"""Nested comparison: what is equal, and where what is not differs."""

from dataclasses import dataclass

import pytest
import torch

from megakit.testing import assert_elements_equal

NAN = float("nan")


@dataclass
class Item:
    tokens: torch.Tensor
    name: str


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"a": (1, [2.5, "x", None]), "b": torch.tensor([1.0, NAN])},
        lambda: Item(torch.tensor([1, 2]), "x"),
    ],
)
def test_equal(make):
    assert_elements_equal(make(), make())


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (1, 1.0, "sample is of type int and float"),
        ({"a": [0, {"b": 1}]}, {"a": [0, {"b": 2}]}, r"sample\['a'\]\[1\]\['b'\] is 1 and 2"),
        (Item(torch.zeros(1), "x"), Item(torch.zeros(1), "y"), r"sample\['name'\] is 'x' and 'y'"),
        (torch.zeros(2), torch.zeros(3), r"the shape torch.Size\(\[2\]\) and torch.Size\(\[3\]"),
        (torch.zeros(2), torch.zeros(2).int(), "the dtype torch.float32 and torch.int32"),
        (torch.zeros(2), torch.tensor([0, NAN]), r"sample\[1\] is 0.0 and nan"),
    ],
)
def test_different(a, b, message):
    with pytest.raises(AssertionError, match=message):
        assert_elements_equal(a, b)
