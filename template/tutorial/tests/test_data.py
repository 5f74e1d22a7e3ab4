"""Tests that the datasets keep the rules for training with Megatron.

The checks find errors that training would not report: random numbers that differ between ranks or
after a resumption, samples that depend on the order of reading, batches that differ from samples.
"""

from typing import Any

import pytest

from megakit.data import EpochIndex
from megakit.testing import (
    assert_dataset_compatible_with_megatron,
    assert_dataset_elements_not_equal,
)
from tests.project import DATA, SHAPE

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture(scope="module")
def data(megatron: None) -> Any:
    """Returns the data module of pretraining."""
    from model_components import MNISTDataModule

    module = MNISTDataModule(**DATA, corruption=0.2)
    module.setup("fit")
    return module


@pytest.mark.parametrize("name", ["train_set", "val_set", "test_set"])
def test_rules(data: Any, name: str) -> None:
    assert_dataset_compatible_with_megatron(getattr(data, name))


def test_corruption_differs_between_epochs(data: Any) -> None:
    """The assertion also checks the rules at both indices, so ranks get equal corruption."""
    images = data.train_set.dataset
    assert_dataset_elements_not_equal(images, EpochIndex(0, 5), EpochIndex(1, 5))


def test_the_checks_find_a_broken_rule(data: Any) -> None:
    """A dataset that breaks a rule must fail the checks."""
    import torch

    class Noisy(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> torch.Tensor:
            # Torch's global generator differs between ranks, so ranks would get different samples.
            return torch.rand(2) + range(10)[index]

    with pytest.raises(AssertionError, match="generator"):
        assert_dataset_compatible_with_megatron(Noisy())


def test_shapes(data: Any) -> None:
    import torch

    item = data.test_set[0]
    assert item["data"].shape == SHAPE
    assert item["data"].dtype == torch.float32
    assert item["data"].isfinite().all()
    label = torch.utils.data.default_collate([item["label"]])  # a number, or a tensor
    assert label.isfinite().all()
