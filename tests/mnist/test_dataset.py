"""MNIST as samples, as whole batches and in balanced parts."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, default_collate
from torchvision.datasets import MNIST
from torchvision.transforms import functional

from megakit.testing import assert_dataset_compatible_with_megatron, assert_elements_equal
from mnist.dataset import MNISTCustom, balanced_subset

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def test_set(made_up_mnist: Path) -> MNISTCustom:
    return MNISTCustom(made_up_mnist, train=False)


def test_items_are_torchvisions(test_set: MNISTCustom, made_up_mnist: Path) -> None:
    theirs = MNIST(str(made_up_mnist), train=False, transform=functional.to_tensor)
    assert len(test_set) == 10_000
    assert len(MNISTCustom(made_up_mnist)) == 60_000
    for index in (0, 1234, 9999):
        item = test_set[index]
        image, label = theirs[index]
        assert_elements_equal(item, {"data": image, "label": label, "idx": index})
        assert item["data"].max() > 0.5


def test_batches_are_collated_items(test_set: MNISTCustom) -> None:
    indices = np.array([3, 9999, 3, -1])
    batch: Any = test_set.get_batch(indices)
    assert_elements_equal(batch, default_collate([test_set[int(index)] for index in indices]))
    assert batch["idx"].tolist() == [3, 9999, 3, 9999]
    assert batch["label"].dtype == batch["idx"].dtype == torch.int64


def test_a_transform_of_the_users_own(test_set: MNISTCustom, made_up_mnist: Path) -> None:
    def upside_down(picture: Any) -> torch.Tensor:
        return functional.to_tensor(functional.rotate(picture, 180))

    mine = MNISTCustom(made_up_mnist, train=False, transform=upside_down)
    assert_dataset_compatible_with_megatron(mine)
    image, label = MNIST(str(made_up_mnist), train=False, transform=upside_down)[1234]
    assert_elements_equal(mine[1234], {"data": image, "label": label, "idx": 1234})
    turned = mine.get_batch(np.arange(4))["data"]
    assert torch.equal(turned, test_set.get_batch(np.arange(4))["data"].flip(2, 3))


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
