"""Prefetched batches: the same ones in the same order, and only where that is allowed."""

import itertools
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Subset

from megakit.data import (
    BlendedDataset,
    IdentityMultiEpochDatasetWrapper,
    MultiEpochDatasetResampler,
)
from megakit.data.loader import make_loader
from megakit.data.prefetch import CHUNK_BATCHES, can_be_prefetched, prefetch
from megakit.testing import assert_elements_equal

Indices = NDArray[np.int64]


class Source:
    """Returns batches of any form, and records the size of each call."""

    def __init__(self, form: Callable[[torch.Tensor], Any] = lambda rows: {"x": rows}) -> None:
        self.form = form
        self.calls: list[int] = []

    def __call__(self, indices: Indices) -> Any:
        self.calls.append(len(indices))
        return self.form(torch.from_numpy(indices)[:, None] * torch.arange(1.0, 4.0))


def batches(count: int, rows: int = 4) -> Iterator[Indices]:
    return iter(np.arange(count * rows).reshape(count, rows))


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dict": lambda rows: {"x": rows, "idx": rows[:, 0].long()},
    "strings": lambda rows: {"x": rows, "name": [str(row) for row in rows]},
    "scalar": lambda rows: {"x": rows, "temperature": torch.tensor(0.5)},
    "more rows": lambda rows: {"x": rows, "halves": rows.repeat_interleave(2, 0)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [0, 1, CHUNK_BATCHES + 2, 50])
def test_the_same_batches_in_the_same_order(form: str, count: int) -> None:
    expected = list(map(Source(FORMS[form]), batches(count)))
    assert_elements_equal(list(prefetch(Source(FORMS[form]), batches(count))), expected)


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="torch computes in one thread here anyway")
def test_the_model_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakit.data.prefetch.BUSY_SECONDS", 0)
    before = torch.get_num_threads()
    seen = []

    def fetch(indices: Indices) -> dict[str, torch.Tensor]:
        seen.append(torch.get_num_threads())
        return {"x": torch.from_numpy(indices)}

    assert len(list(prefetch(fetch, batches(60)))) == 60
    assert seen == [before, before, before, 1, 1]
    assert torch.get_num_threads() == before


def test_large_batches_come_one_by_one() -> None:
    # 1.6 and 1.4 MB for each row: two batches exceed a chunk only with both tensors.
    source = Source(lambda rows: {"x": rows.repeat(1, 133_000), "y": rows.repeat(1, 117_000)})
    found = prefetch(source, batches(4, rows=1))
    assert [batch["x"][0, 1].item() for batch in found] == [0, 2, 4, 6]
    assert source.calls == [1, 1, 1, 1]


def test_one_chunk_ahead_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakit.data.prefetch.BUSY_SECONDS", 0)
    source = Source()
    found = prefetch(source, batches(1000))
    list(itertools.islice(found, 34))  # two chunks, and one batch of the third
    found.close()  # type: ignore[attr-defined]  # waits for the thread
    assert [rows // 4 for rows in source.calls] == [1, 16, 16, 16, 16]
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch_0"]


def test_a_batch_may_be_changed_in_place() -> None:
    for batch in prefetch(Source(), batches(20)):
        assert not (batch["x"] < 0).any()
        batch["x"].neg_().sub_(1)


def test_the_user_sees_an_error_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakit.data.prefetch.BUSY_SECONDS", 0)

    def fetch(indices: Indices) -> dict[str, torch.Tensor]:
        if (indices > 200).any():
            raise OSError("the disk is gone")
        return {"x": torch.from_numpy(indices)}

    found = prefetch(fetch, batches(60))
    received: list[dict[str, torch.Tensor]] = []
    with pytest.raises(OSError, match="the disk is gone"):
        received.extend(found)  # extends up to the error
    assert len(received) == 1 + 3 * CHUNK_BATCHES


class Single(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor(index)}


class Batched(Single):
    def get_batch(self, indices: Any) -> Any:
        return {"x": torch.from_numpy(indices)}


class OutOfDate(Batched):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor(-index)}


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Batched(), True),
        (Subset(Batched(), [3, 1]), True),
        (MultiEpochDatasetResampler(IdentityMultiEpochDatasetWrapper(Batched())), True),
        (BlendedDataset([(Batched(), 1), (Single(), 2)]), False),
        (OutOfDate(), False),
        (MultiEpochDatasetResampler(IdentityMultiEpochDatasetWrapper(Single())), False),
    ],
)
def test_which_datasets_are_prefetched(dataset: Any, expected: bool) -> None:
    assert can_be_prefetched(dataset) is expected


class Whole:
    """Samples 0 to 11 in batches of 2."""

    num_samples = end = 12

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Indices]:
        return batches(6, rows=2)


class FromDatabase(Single):
    """SQLite's connections belong to the thread that opened them."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:")

    def __getitem__(self, index: int) -> Any:
        (value,) = self.connection.execute("select ? * 2", (index,)).fetchone()
        return {"x": torch.tensor(value)}


def test_a_dataset_that_belongs_to_a_thread_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakit.data.prefetch.CHUNK_BATCHES", 1)
    monkeypatch.setattr("megakit.data.prefetch.BUSY_SECONDS", 0)
    dataset = MultiEpochDatasetResampler(
        IdentityMultiEpochDatasetWrapper(FromDatabase()), shuffle=False
    )
    found = make_loader(DataLoader(dataset), Whole())
    assert [batch["x"].tolist() for batch in found][-1] == [20, 22]
