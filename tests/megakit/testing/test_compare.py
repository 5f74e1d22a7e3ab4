"""Nested comparison: what is equal, where what is not differs, and what shares memory."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megakit.testing import assert_elements_equal
from megakit.testing.compare import first_difference, shared_memory

Pair = namedtuple("Pair", ["left", "right"])
NAN = float("nan")


@dataclass
class Item:
    tokens: torch.Tensor
    name: str


class Plain:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"a": (1, [2.5, "x", None]), "b": torch.tensor([1.0, NAN])},
        lambda: np.array([1.0, NAN, np.inf]),
        lambda: np.array(["NaT", "2020-01-01"], "datetime64[D]"),
        lambda: np.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
        lambda: np.array([{"a": NAN}, None], dtype=object),
        lambda: torch.tensor([NAN, 1], dtype=torch.bfloat16),
        lambda: torch.tensor([1 + 2j]),
        lambda: torch.eye(3).to_sparse(),
        lambda: (NAN, complex(NAN, 1), np.float32(NAN)),
        lambda: Item(torch.tensor([1, 2]), "x"),
        lambda: Pair(torch.zeros(0), Plain([1, 2])),
        lambda: {1, 2, 3},
    ],
)
def test_equal(make):
    assert_elements_equal(make(), make())


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (1, 2, "sample is 1 and 2"),
        (1, 1.0, "sample is of type int and float"),
        ("a", "b", "sample is 'a' and 'b'"),
        (None, 0, "sample is of type NoneType and int"),
        (0.5, NAN, "sample is 0.5 and nan"),
        ([1, 2], [1], "sample has 2 and 1 elements"),
        ([1], (1,), "sample is of type list and tuple"),
        ({"a": 1}, {"b": 1}, r"sample has the keys \['a'\] and \['b'\]"),
        ({"a": [0, {"b": 1}]}, {"a": [0, {"b": 2}]}, r"sample\['a'\]\[1\]\['b'\] is 1 and 2"),
        (Pair(1, 2), Pair(1, 3), "sample.right is 2 and 3"),
        (Item(torch.zeros(1), "x"), Item(torch.zeros(1), "y"), "sample.name is 'x' and 'y'"),
        (Plain(1), Plain(2), "sample is <.*Plain"),
        (torch.zeros(2), torch.zeros(3), r"the shape torch.Size\(\[2\]\) and torch.Size\(\[3\]"),
        (torch.zeros(2), torch.zeros(2).int(), "the dtype torch.float32 and torch.int32"),
        (torch.zeros(2), np.zeros(2), "sample is of type Tensor and ndarray"),
        (torch.zeros(2), torch.tensor([0, NAN]), r"sample\[1\] is 0.0 and nan \(1 of 2 values"),
        (torch.tensor(1), torch.tensor(2), "^sample is 1 and 2$"),
        (torch.zeros(2, 3), torch.ones(2, 3), r"sample\[0, 0\] is 0.0 and 1.0 \(6 of 6 values"),
        (np.zeros(2), np.zeros(2, np.float32), "the dtype float64 and float32"),
        (np.array([1, 2]), np.array([1, 3]), r"sample\[1\] is 2 and 3 \(1 of 2 values differ\)"),
        (np.array([None, [1]], object), np.array([None, [2]], object), r"sample\[1\]\[0\] is 1"),
    ],
)
def test_different(a, b, message):
    with pytest.raises(AssertionError, match=message):
        assert_elements_equal(a, b)
    assert first_difference(b, a)


def test_shared_memory():
    tensor, array = torch.zeros(10), np.zeros((4, 6))
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    assert shared_memory({"a": tensor[:5]}, [0, tensor[4:]]) == ("sample['a']", "sample[1]")
    assert shared_memory(tensor, tensor.numpy()) == ("sample", "sample")
    assert shared_memory(array[:, 1], array[2]) == ("sample", "sample")
    waves = torch.zeros(3, dtype=torch.complex64)
    assert shared_memory(waves.conj(), waves) == ("sample", "sample")
    assert shared_memory(tensor[:5], tensor[5:]) is None
    assert shared_memory(array[:, 1], array[:, 2]) is None
    assert shared_memory(tensor, tensor.clone()) is None
    assert shared_memory(read_only, read_only) is None
    assert shared_memory(torch.zeros(0), torch.zeros(0)) is None
