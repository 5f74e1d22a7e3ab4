"""MNIST as samples, and as whole batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torchvision.datasets import MNIST
from torchvision.transforms import functional

from megakit.testing import assert_dataset_compatible_with_megatron, assert_elements_equal
from mnist.dataset import MNISTCustom

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
