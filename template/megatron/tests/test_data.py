"""Tests that the datasets keep the rules for training with Megatron.

The checks find errors that training would not report: random numbers that differ between ranks or
after a resumption, samples that depend on the order of reading, batches that differ from samples.
"""

from typing import Any

import pytest

from megakit.data import EpochIndex, MultiEpochDatasetResampler
from megakit.testing import (
    assert_dataset_compatible_with_megatron,
    assert_dataset_elements_not_equal,
)
from tests.project import DATA, NUM_TEST, SHAPE

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture(scope="module")
def data(megatron: None) -> dict[str, Any]:
    """Returns the datasets, and the training set as pretraining reads it: shuffled, corrupted."""
    from examples.megatron.model_components import DropPixels
    from mnist.files import read_splits

    splits: Any = read_splits
    train, validation, test = splits(**DATA)
    epochs = MultiEpochDatasetResampler(DropPixels(train, share=0.2), num_epochs=3)
    return {"train": train, "validation": validation, "test": test, "epochs": epochs}


@pytest.mark.parametrize("name", ["train", "validation", "test", "epochs"])
def test_rules(data: dict[str, Any], name: str) -> None:
    assert_dataset_compatible_with_megatron(data[name])


def test_corruption_differs_between_epochs(data: dict[str, Any]) -> None:
    """The assertion also checks the rules at both indices, so ranks get equal corruption."""
    images = data["epochs"].dataset
    assert_dataset_elements_not_equal(images, EpochIndex(0, 5), EpochIndex(1, 5))


def test_shapes(data: dict[str, Any]) -> None:
    import torch

    assert len(data["test"]) == NUM_TEST
    item = data["test"][0]
    assert item["data"].shape == SHAPE
    assert item["data"].dtype == torch.float32
    assert item["data"].isfinite().all()
    label = torch.utils.data.default_collate([item["label"]])  # a number, or a tensor
    assert label.isfinite().all()
