"""Balanced parts of a dataset."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Subset

from megakit.data import balanced_subset


class Labelled(list):
    """Its samples are their own numbers."""

    def __init__(self, counts):
        self.labels = np.repeat(np.arange(len(counts)), counts)
        super().__init__(range(len(self.labels)))


def part(dataset: Any, size: int, seed: int = 1) -> list[int]:
    subset: Any = balanced_subset(dataset, size, seed)
    return list(subset)


@pytest.mark.parametrize("size", [1, 9, 10, 25, 28])
def test_classes_differ_by_one_at_most(size):
    dataset = Labelled([50, 30, 10])
    subset = part(dataset, size)
    assert len(set(subset)) == len(subset) == size
    counts = [Counter(dataset.labels[subset])[label] for label in range(3)]
    assert max(counts) - min(counts) <= 1


def test_a_class_that_is_used_up_leaves_the_rest_to_the_others():
    dataset = Labelled([50, 30, 2])
    subset = part(dataset, 42)
    assert Counter(dataset.labels[subset].tolist()) == {0: 20, 1: 20, 2: 2}


def test_more_than_there_are():
    dataset = Labelled([3, 4])
    assert sorted(part(dataset, 100)) == list(range(7))


def test_smaller_ones_are_contained_and_seeds_differ():
    dataset = Labelled([50, 30, 10])
    parts = [part(dataset, size) for size in (7, 30)]
    assert parts[1][:7] == parts[0]
    assert part(dataset, 7) == parts[0]
    assert part(dataset, 7, seed=2) != parts[0]


def test_parts_of_parts():
    """As after a split: indices are the part's, labels the whole dataset's."""
    dataset: Any = Labelled([50, 30, 10])
    inner: Any = Subset(Subset(dataset, list(range(89, -1, -1))), list(range(0, 90, 2)))
    subset = part(inner, 12)
    assert set(subset) <= set(inner)
    assert set(Counter(dataset.labels[subset]).values()) == {4}


def test_labels_have_to_be_there():
    dataset: Any = [1, 2, 3]
    with pytest.raises(TypeError, match=r"list has no `labels`"):
        balanced_subset(dataset, 2, seed=1)
