"""Each rule with a dataset that breaks just that one, and ones that keep it."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, random_split

from megakit.data import EpochIndex, PRNGResampleDataset
from megakit.data.generators import generator_states
from megakit.testing import (
    DatasetDistributedNondeterministic,
    DatasetLocallyNondeterministic,
    assert_dataset_compatible_with_megatron,
    assert_dataset_elements_not_equal,
)
from tests.megakit.testing import broken_datasets as broken

GOOD = {
    "Seeded": broken.Seeded,
    "PlainBatches": broken.PlainBatches,
    "Epochs": broken.Epochs,
    "too long to be read": lambda: range(10**12),
    "tensors": lambda: TensorDataset(torch.rand(7, 3), torch.arange(7)),
    "one sample": lambda: broken.Good(1),
    "split": lambda: random_split(broken.PlainBatches(), [7, 3])[0],
    "drawn": lambda: PRNGResampleDataset(TensorDataset(torch.rand(4, 3)), num_samples=30),
}

LOCAL, DISTRIBUTED = DatasetLocallyNondeterministic, DatasetDistributedNondeterministic
# The dataset, the error, the message with the path inside the sample.
BROKEN = {
    "TorchGlobal": (LOCAL, r"dataset\[0\] draws from or seeds .* torch\. .*sample_generator"),
    "PythonGlobal": (LOCAL, r"dataset\[0\] draws from or seeds .* random\."),
    "NumpySeed": (DISTRIBUTED, r"dataset\[0\] draws from or seeds .* numpy\."),
    "ForkedDraw": (DISTRIBUTED, r"dataset\[0\] depends on the state .*sample\['x'\]\[0, 0\]"),
    "Unseeded": (LOCAL, r"dataset\[0\] differs .*sample\['x'\]\['deep'\]\[1\]\[1\]\[0\]"),
    "UnseededEpochs": (LOCAL, r"EpochIndex\(epoch=0, idx=0\)\] .*\['noise'\]\[0\]"),
    "Remembers": (LOCAL, r"dataset\[5\] depends on what was read before it: sample\['x'\]\[1\]"),
    "OneBuffer": (AssertionError, r"dataset\[0\] changes .*: sample\['x'\]\[0\] is 0.0 and 9.0"),
    "TooLong": (AssertionError, r"len\(dataset\) is 10, but dataset\[9\] fails with IndexError"),
    "OtherItems": (AssertionError, r"__getitems__.* differ: .*sample\['x'\]\[0, 0\]"),
    "SortedBatch": (
        AssertionError,
        r"\[9, 5, 2, 1, 0\] and their batch .*\['x'\]\[0, 0, 0\] is 9.0 and",
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_datasets_that_keep_the_rules(name):
    assert_dataset_compatible_with_megatron(GOOD[name]())


@pytest.mark.parametrize("name", BROKEN)
def test_datasets_that_break_one(name):
    kind, message = BROKEN[name]
    with pytest.raises(kind, match=message):
        assert_dataset_compatible_with_megatron(getattr(broken, name)())


def test_an_empty_dataset():
    with pytest.raises(AssertionError, match="dataset is empty"):
        assert_dataset_compatible_with_megatron([])


def test_the_given_index_is_read():
    class Unlucky(broken.Good):
        def values(self, index):
            return np.random.default_rng(None if index == 7 else index).random()

    assert_dataset_compatible_with_megatron(Unlucky())
    with pytest.raises(AssertionError, match=r"dataset\[7\] differs when read again"):
        assert_dataset_compatible_with_megatron(Unlucky(), 7)
    with pytest.raises(AssertionError, match=r"is 10, but dataset\[11\] fails with IndexError"):
        assert_dataset_compatible_with_megatron(Unlucky(), 11)
    assert_dataset_compatible_with_megatron(broken.Epochs(), EpochIndex(3, 7))


def test_global_generators_are_left_as_they_were():
    before = generator_states()
    for dataset in (broken.TorchGlobal(), broken.NumpySeed(), broken.PythonGlobal()):
        with pytest.raises(AssertionError):
            assert_dataset_compatible_with_megatron(dataset)
    assert generator_states() == before


def test_elements_not_equal():
    assert_dataset_elements_not_equal(broken.Good())
    assert_dataset_elements_not_equal(broken.Epochs(), EpochIndex(0, 3), EpochIndex(1, 3))
    with pytest.raises(AssertionError, match=r"idx=3\)\] are equal, though they should differ"):
        assert_dataset_elements_not_equal(broken.SameEpochs(), EpochIndex(0, 3), EpochIndex(1, 3))
    with pytest.raises(AssertionError, match="differs when read again"):
        assert_dataset_elements_not_equal(broken.Unseeded())
