"""Some samples of a dataset, balanced over the classes."""

from collections import Counter
from typing import Any

import numpy as np
from torch.utils.data import Subset

from megakit.data import balanced_subset


class Labelled(list):
    """Its samples are their own numbers."""

    def __init__(self, *counts: int) -> None:
        self.labels = np.repeat(np.arange(len(counts)), counts)
        super().__init__(range(len(self.labels)))


def part(dataset: Any, size: int, seed: int = 1) -> list[int]:
    subset: Any = balanced_subset(dataset, size, seed)
    return list(subset)


def test_balanced_parts() -> None:
    """`--num-labels` trains on the same images in every version, also on a part of a split."""
    dataset: Any = Labelled(50, 30, 10)
    assert part(dataset, 7) == part(dataset, 30)[:7] == [64, 34, 88, 61, 14, 84, 8]
    assert part(dataset, 7, seed=2) != part(dataset, 7)
    few = part(Labelled(50, 30, 2), 25)  # the third class has too few
    assert sorted(Counter(Labelled(50, 30, 2).labels[few].tolist()).values()) == [2, 11, 12]
    inner: Any = Subset(Subset(dataset, list(range(89, -1, -1))), list(range(0, 90, 2)))
    subset = part(inner, 12)
    assert set(subset) <= set(inner)
    assert set(Counter(dataset.labels[subset]).values()) == {4}
