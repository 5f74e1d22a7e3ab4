"""Balanced parts of a dataset."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Subset

from mnist.dataset import balanced_subset


class Labelled(list):
    """Its samples are their own numbers."""

    def __init__(self, counts):
        self.labels = np.repeat(np.arange(len(counts)), counts)
        super().__init__(range(len(self.labels)))


def part(dataset: Any, size: int, seed: int = 1) -> list[int]:
    subset: Any = balanced_subset(dataset, size, seed)
    return list(subset)


@pytest.mark.parametrize(
    ("size", "counts"), [(1, [0, 0, 1]), (9, [4, 3, 2]), (25, [12, 11, 2]), (100, [50, 30, 2])]
)
def test_classes_come_in_turn(size, counts):
    dataset = Labelled([50, 30, 2])
    subset = part(dataset, size)
    assert len(set(subset)) == len(subset)
    found = Counter(dataset.labels[subset].tolist())
    assert sorted(found[label] for label in range(3)) == sorted(counts)


def test_known_values():
    """`--num-labels` trains on the same images in every version."""
    assert part(Labelled([50, 30, 10]), 7) == [64, 34, 88, 61, 14, 84, 8]


def test_smaller_ones_are_contained_and_seeds_differ():
    dataset = Labelled([50, 30, 10])
    assert part(dataset, 30)[:7] == part(dataset, 7)
    assert part(dataset, 7, seed=2) != part(dataset, 7)


def test_parts_of_parts():
    """As after a split: indices are the part's, labels the whole dataset's."""
    dataset: Any = Labelled([50, 30, 10])
    inner: Any = Subset(Subset(dataset, list(range(89, -1, -1))), list(range(0, 90, 2)))
    subset = part(inner, 12)
    assert set(subset) <= set(inner)
    assert set(Counter(dataset.labels[subset]).values()) == {4}
