"""The data module: the published split, balanced labels, and pixels that are dropped."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from megakit.data import EpochIndex
from megakit.testing import assert_dataset_compatible_with_megatron, assert_elements_equal


def digits(components: ModuleType, **options: Any) -> Any:
    data = components.MNISTDataModule(dataset="digits", **options)
    data.setup("fit")
    return data


def test_the_split_is_the_tutorials_whatever_the_seed(
    components: ModuleType, made_up_mnist: Path
) -> None:
    """And the files are mapped once, for all parts."""
    modules: list[Any] = [
        components.MNISTDataModule(data_dir=str(made_up_mnist), seed=seed) for seed in (42, 7)
    ]
    expected = torch.randperm(60_000, generator=torch.Generator().manual_seed(42)).tolist()
    drawn = []
    for data in modules:
        data.setup("fit")
        assert [*map(len, (data.mnist_train, data.mnist_val, data.mnist_test))] == [55e3, 5e3, 10e3]
        assert data.mnist_val.indices == expected[55_000:]
        drawn.append([data.mnist_train[index]["idx"] for index in range(0, 55_000, 500)])
        assert len({*drawn[-1]}) == len(drawn[-1])
        assert {*drawn[-1]} <= {*expected[:55_000]}
    assert drawn[0] != drawn[1]
    images = modules[0].mnist_val.dataset.images
    assert images is modules[0].mnist_train.dataset.dataset.dataset.images


def test_loaders_give_real_batches_without_a_trainer(components: ModuleType) -> None:
    data = digits(components, batch_size=16)
    for loader, dataset in (
        (data.train_dataloader(), data.train_set),
        (data.val_dataloader(), data.val_set),
        (data.predict_dataloader(), data.test_set),
    ):
        batch = next(iter(loader))
        assert_elements_equal(batch, default_collate([dataset[i] for i in range(16)]))


def test_the_tutorials_attributes(components: ModuleType) -> None:
    data = components.MNISTDataModule(batch_size=16)
    assert (data.micro_batch_size, data.global_batch_size) == (16, 16)
    assert data.max_len == data.data_sampler.seq_len
    assert components.MNISTDataModule("./", 16, global_batch_size=64).global_batch_size == 64


def test_nemo_logs_metrics_of_its_own_only_if_asked(components: ModuleType) -> None:
    """It would log five values at every step."""
    for options in ({}, {"output_log": True}):
        sampler = components.MNISTDataModule(dataset="digits", **options).data_sampler
        assert sampler.output_log == bool(options)


def test_few_labels_are_balanced_and_drawn_by_the_seed(components: ModuleType) -> None:
    """What is drawn: tests/megakit/data/test_subsets.py."""

    def items(seed: int) -> list[Any]:
        return [*digits(components, num_labels=100, seed=seed).mnist_train]

    assert np.bincount([item["label"] for item in items(1)]).tolist() == [10] * 10
    assert {item["idx"] for item in items(1)} != {item["idx"] for item in items(2)}


def test_pixels_are_dropped_by_epoch_and_index(components: ModuleType) -> None:
    """By the seed, too: tests/test_training_scripts.py."""
    dataset = digits(components, corruption=0.3).mnist_train.dataset
    count = np.arange(200)
    first, second = (dataset.get_batch(EpochIndex(count * 0 + epoch, count)) for epoch in (0, 1))
    changed = first["corrupted"] != first["data"]
    assert torch.all(first["corrupted"][changed] == 0)
    assert changed[first["data"] > 0].float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert torch.equal(first["data"], second["data"])
    assert not torch.equal(first["corrupted"], second["corrupted"])


@pytest.mark.parametrize("corruption", [0.0, 0.3])
def test_batches_equal_samples(components: ModuleType, corruption: float) -> None:
    """Images of validation and test are never corrupted."""
    data = digits(components, corruption=corruption)
    for dataset in (data.mnist_train, data.mnist_val, data.mnist_test):
        assert_dataset_compatible_with_megatron(dataset)
        is_corrupted = corruption > 0 and dataset is data.mnist_train
        assert ("corrupted" in dataset[0]) == is_corrupted
