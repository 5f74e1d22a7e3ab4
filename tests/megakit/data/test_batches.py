"""Batched fetching: what is preferred, what is seen through, and that batches equal samples."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, default_collate, random_split

from megakit.data import fetch_batch, fetch_samples
from megakit.testing import assert_elements_equal


class Squares(Dataset):
    """Counts how it is read."""

    def __init__(self):
        self.calls = []

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.calls.append("item")
        if not -20 <= index < 20:
            raise IndexError(index)
        return {"square": float(index**2), "idx": index % 20}


class BatchedSquares(Squares):
    def get_batch(self, indices):
        self.calls.append("batch")
        assert isinstance(indices, np.ndarray)
        indices = torch.from_numpy(indices)
        return {"square": (indices**2).double(), "idx": indices}


class ListedSquares(Squares):
    def __getitems__(self, indices):
        self.calls.append("items")
        return [{"square": float(index**2), "idx": index} for index in indices]


class RootsAgain(BatchedSquares):
    """Changes samples, but inherits a get_batch that knows nothing of it."""

    def __getitem__(self, index):
        return {"root": float(index)}


@pytest.mark.parametrize(
    ("dataset_class", "calls"),
    [(Squares, ["item"] * 3), (BatchedSquares, ["batch"]), (ListedSquares, ["items"])],
)
def test_the_best_way_is_taken(dataset_class, calls):
    dataset = dataset_class()
    indices = np.array([3, 0, 19])
    batch = fetch_batch(dataset, indices)
    assert dataset.calls == calls
    assert_elements_equal(batch, default_collate([dataset[i] for i in indices.tolist()]))
    assert_elements_equal(fetch_samples(dataset, indices), [dataset[i] for i in indices.tolist()])


def test_an_outdated_get_batch_is_not_used():
    assert fetch_batch(RootsAgain(), np.array([4, 5]))["root"].tolist() == [4.0, 5.0]


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda x: range(5, 15)])
def test_subsets_are_seen_through(kind):
    dataset = BatchedSquares()
    subset = Subset(dataset, kind([7, 3, 3, 18, 0]))
    batch = fetch_batch(subset, np.array([4, 0, 0, 2]))
    assert dataset.calls == ["batch"]
    assert_elements_equal(batch, default_collate([subset[i] for i in (4, 0, 0, 2)]))


def test_splits_of_splits():
    dataset = BatchedSquares()
    outer, _ = random_split(dataset, [15, 5], torch.Generator().manual_seed(42))
    _, inner = random_split(outer, [9, 6], torch.Generator().manual_seed(1))
    batch = fetch_batch(inner, np.arange(6))
    assert dataset.calls == ["batch"]
    assert_elements_equal(batch, default_collate([inner[i] for i in range(6)]))


class Shifted(Subset):
    def __getitem__(self, index):
        return {"idx": super().__getitem__(index)["idx"] + 100}

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_a_changed_subset_is_not_seen_through():
    subset = Shifted(BatchedSquares(), [1, 2])
    assert fetch_batch(subset, np.array([1]))["idx"].tolist() == [102]


@pytest.mark.parametrize("dataset", [Squares(), BatchedSquares()])
def test_no_empty_batches(dataset):
    with pytest.raises(ValueError, match="at least one index"):
        fetch_batch(dataset, np.empty(0, np.int64))


def test_outside_a_subset():
    with pytest.raises(IndexError):
        fetch_batch(Subset(BatchedSquares(), [1, 2]), np.array([2]))
