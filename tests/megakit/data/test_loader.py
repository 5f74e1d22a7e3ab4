"""From a sampler's indices to batches: one way or the other, with workers or without."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from megakit.data.loader import make_loader
from megakit.data.prefetch import CHUNK_BATCHES, prefetch
from megakit.testing import assert_elements_equal


class Squares(Dataset):
    """Can give single samples only."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"square": torch.full((3,), float(index**2)), "idx": index}


class BatchedSquares(Squares):
    """The same in batches, from an array that must not be written to."""

    def __init__(self):
        self.squares = np.repeat(np.arange(10, dtype=np.float32) ** 2, 3).reshape(10, 3)
        self.squares.flags.writeable = False

    def get_batch(self, indices):
        return {
            "square": torch.from_numpy(self.squares.take(indices, axis=0)),
            "idx": torch.from_numpy(indices),
        }


BATCHES = [*np.arange(8).reshape(2, 4)]


def loader(
    dataset: Any, sampler: Any, padding_weight: float | None = None, **options: Any
) -> DataLoader:
    return make_loader(DataLoader(dataset, **options), sampler, padding_weight)


def as_list(samples):
    """A collate_fn: the samples' squares, as Python's numbers."""
    return {"squares": [sample["square"][0].item() for sample in samples]}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset_class", [Squares, BatchedSquares])
def test_samples_and_batches_give_the_same_with_any_workers(dataset_class, num_workers):
    before = torch.get_rng_state()
    found = list(loader(dataset_class(), BATCHES, num_workers=num_workers))
    expected = [default_collate([Squares()[i] for i in batch.tolist()]) for batch in BATCHES]
    assert_elements_equal(found, expected)
    # Else dropout would depend on the number of workers.
    assert torch.equal(torch.get_rng_state(), before)
    lists = loader(dataset_class(), BATCHES, num_workers=num_workers, collate_fn=as_list)
    assert list(lists) == [{"squares": [0, 1, 4, 9]}, {"squares": [16, 25, 36, 49]}]


class Tokens(Squares):
    """Has a mask of its own, and hands out the same tensor again and again."""

    def __init__(self):
        self.mask = torch.tensor([[1.0, 0.0]] * 12)

    def get_batch(self, indices):
        return {"loss_mask": self.mask[: len(indices)]}


def test_a_datasets_own_mask_is_weighted():
    dataset = Tokens()
    (last,) = loader(dataset, [np.array([8, 9, -1, -1])], 1.2)
    expected = torch.tensor([[1.2, 0.0], [1.2, 0.0], [0.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(last["loss_mask"], expected)
    assert dataset.mask.tolist() == [[1.0, 0.0]] * 12
    with pytest.raises(TypeError, match=r"evaluation batch is a list; .* Return dicts"):
        next(iter(loader([(1, 2)] * 8, BATCHES, 1.0)))


# --- Prefetching ----------------------------------------------------------------------------------


class Source:
    """Returns batches of any form, up to an index."""

    def __init__(self, form: Any = lambda rows: {"x": rows}, limit: int = 10**6) -> None:
        self.form, self.limit = form, limit

    def __call__(self, indices: Any) -> Any:
        if indices.max() > self.limit:
            raise OSError("the disk is gone")
        return self.form(torch.from_numpy(indices)[:, None] * torch.arange(1.0, 4.0))


def rows_of(count: int, rows: int = 4) -> Iterator[Any]:
    return iter(np.arange(count * rows).reshape(count, rows))


@pytest.mark.parametrize(
    "form",
    [
        lambda rows: {"x": rows, "idx": rows[:, 0].long()},
        lambda rows: {"x": rows, "name": [str(row) for row in rows]},
        lambda rows: {"x": rows, "halves": rows.repeat_interleave(2, 0)},
    ],
)
def test_the_same_batches_in_the_same_order(form):
    expected = list(map(Source(form), rows_of(50)))
    assert_elements_equal(list(prefetch(Source(form), rows_of(50))), expected)
    assert not list(prefetch(Source(form), rows_of(0)))


def test_the_user_sees_an_error_of_the_thread():
    received: list[Any] = []
    with pytest.raises(OSError, match="the disk is gone"):
        received.extend(prefetch(Source(limit=200), rows_of(60)))  # extends up to the error
    assert len(received) == 1 + 3 * CHUNK_BATCHES
