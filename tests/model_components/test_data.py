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
    assert images.dtype == np.uint8
    assert not images.flags.owndata
    assert not images.flags.writeable
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


def labelled(components: ModuleType, num_labels: int, seed: int) -> tuple[set[int], list[int]]:
    """Indices and labels of the images that an epoch sees."""
    data = digits(components, num_labels=num_labels, seed=seed)
    items = [data.mnist_train[i] for i in range(len(data.mnist_train))]
    return {item["idx"] for item in items}, [item["label"] for item in items]


def test_few_labels_are_balanced_and_drawn_by_the_seed(components: ModuleType) -> None:
    indices, labels = labelled(components, 100, seed=1)
    assert len(indices) == 100
    assert np.bincount(labels).tolist() == [10] * 10
    assert labelled(components, 100, seed=1)[0] == indices
    assert labelled(components, 100, seed=2)[0] != indices
    assert labelled(components, 50, seed=1)[0] < indices
    _, labels = labelled(components, 25, seed=1)
    assert set(np.bincount(labels, minlength=10)) == {2, 3}


def dropped(components: ModuleType, seed: int, epochs: Any, indices: Any) -> Any:
    """A batch whose pixels were dropped, of some epochs and images."""
    dataset = digits(components, corruption=0.3, seed=seed).mnist_train.dataset
    return dataset.get_batch(EpochIndex(np.asarray(epochs), np.asarray(indices)))


def test_pixels_are_dropped_by_seed_epoch_and_index(components: ModuleType) -> None:
    count = np.arange(200)
    first, second = (dropped(components, 1, count * 0 + epoch, count) for epoch in (0, 1))
    for batch in (first, second):
        changed = batch["corrupted"] != batch["data"]
        assert torch.all(batch["corrupted"][changed] == 0)
        share = changed[batch["data"] > 0].float().mean().item()
        assert share == pytest.approx(0.3, abs=0.01)
    assert torch.equal(first["data"], second["data"])
    assert not torch.equal(first["corrupted"], second["corrupted"])
    few = dropped(components, 1, [1, 0, 0], [7, 7, 5])["corrupted"]
    expected = [second["corrupted"][7], first["corrupted"][7], first["corrupted"][5]]
    assert torch.equal(few, torch.stack(expected))
    assert not torch.equal(dropped(components, 2, [0], [5])["corrupted"], first["corrupted"][5:6])


def test_validation_and_test_images_are_never_corrupted(components: ModuleType) -> None:
    data = digits(components, corruption=0.3)
    assert "corrupted" in data.mnist_train[0]
    assert "corrupted" not in data.mnist_val[0]
    assert "corrupted" not in data.mnist_test[0]


@pytest.mark.parametrize("corruption", [0.0, 0.3])
def test_batches_equal_samples(components: ModuleType, corruption: float) -> None:
    data = digits(components, corruption=corruption)
    for dataset in (data.mnist_train, data.mnist_val):
        assert_dataset_compatible_with_megatron(dataset)
        indices = np.array([5, 0, 41, 5])
        samples = [dataset[index] for index in indices.tolist()]
        assert_elements_equal(dataset.get_batch(indices), default_collate(samples))
