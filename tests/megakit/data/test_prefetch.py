"""Batches fetched ahead: the same ones in the same order, and only where that is allowed."""

import itertools
import sqlite3
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from megakit.data import IdentityMultiEpochDatasetWrapper, MultiEpochDatasetResampler
from megakit.data import prefetch as prefetch_module
from megakit.data.loader import make_loader
from megakit.data.prefetch import CHUNK_BATCHES, can_be_prefetched, prefetch
from megakit.testing import assert_elements_equal


class Source:
    """Gives batches of any form, and remembers who asked for how many."""

    def __init__(self, form: Any = lambda rows: {"x": rows}) -> None:
        self.form = form
        self.calls: list[tuple[int, str]] = []

    def __call__(self, indices: np.ndarray) -> Any:
        self.calls.append((len(indices), threading.current_thread().name))
        return self.form(torch.from_numpy(indices)[:, None] * torch.arange(1.0, 4.0))


def batches(count: int, rows: int = 4) -> Any:
    return iter(np.arange(count * rows).reshape(count, rows))


FORMS: dict[str, Any] = {
    "tensor": lambda rows: rows,
    "dict": lambda rows: {"x": rows, "idx": rows[:, 0].long()},
    "nested": lambda rows: [rows, {"inside": [rows * 2]}],
    "strings": lambda rows: {"x": rows, "name": [str(row) for row in rows]},
    "scalar": lambda rows: {"x": rows, "temperature": torch.tensor(0.5)},
    "tuple": lambda rows: (rows, rows),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [0, 1, 2, CHUNK_BATCHES + 1, CHUNK_BATCHES + 2, 50])
def test_the_same_batches_in_the_same_order(form: str, count: int) -> None:
    expected = list(map(Source(FORMS[form]), batches(count)))
    assert_elements_equal(list(prefetch(Source(FORMS[form]), batches(count))), expected)


def used(found: Any) -> list[Any]:
    """The batches, taken by somebody who is busy with each."""
    taken = []
    for batch in found:
        time.sleep(0.002)
        taken.append(batch)
    return taken


def test_the_first_alone_the_others_together() -> None:
    source = Source()
    assert len(list(prefetch(source, batches(40)))) == 40
    assert [rows // 4 for rows, _ in source.calls] == [1, 16, 16, 7]


def test_in_a_thread_for_a_busy_user() -> None:
    source, here = Source(), threading.current_thread().name
    assert_elements_equal(used(prefetch(source, batches(60))), list(map(Source(), batches(60))))
    names = [name for _, name in source.calls]
    assert names[:3] == [here] * 3  # how long the user takes is known after one chunk
    assert set(names[3:]) == {"data_0"}


def test_in_no_other_thread_for_one_who_only_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    # A loaded machine may stop even a reader for longer than half a millisecond.
    monkeypatch.setattr(prefetch_module, "BUSY_SECONDS", 60)

    def fetch(indices: np.ndarray) -> torch.Tensor:
        assert threading.current_thread() is threading.main_thread()
        return torch.from_numpy(indices)

    assert len(list(prefetch(fetch, batches(60)))) == 60


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="torch computes in one thread here anyway")
def test_the_model_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    seen = []

    def fetch(indices: np.ndarray) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return torch.from_numpy(indices)

    assert len(used(prefetch(fetch, batches(60)))) == 60
    assert seen == [before, before, before, 1, 1]
    assert torch.get_num_threads() == before


def test_large_batches_come_one_by_one() -> None:
    source = Source(lambda rows: rows.repeat(1, 200_000))  # 2.4 MB for each row
    found = prefetch(source, batches(3, rows=1))
    assert [batch[0, 1].item() for batch in found] == [0, 2, 4]
    assert [rows for rows, _ in source.calls] == [1, 1, 1]


def test_one_chunk_ahead_and_no_more() -> None:
    source = Source()
    found = prefetch(source, batches(1000))
    used(itertools.islice(found, 34))  # two chunks, and one of the third
    found.close()  # type: ignore[attr-defined]  # waits for the thread
    assert [rows // 4 for rows, _ in source.calls] == [1, 16, 16, 16, 16]
    assert not [thread for thread in threading.enumerate() if thread.name == "data_0"]


def test_a_batch_may_be_changed_in_place() -> None:
    for batch in prefetch(Source(), batches(20)):
        assert not (batch["x"] < 0).any()
        batch["x"].neg_().sub_(1)


def test_what_fails_in_the_thread_is_raised_to_the_user() -> None:
    def fetch(indices: np.ndarray) -> torch.Tensor:
        if (indices > 200).any():
            raise OSError("the disk is gone")
        return torch.from_numpy(indices)

    with pytest.raises(OSError, match="the disk is gone"):
        used(prefetch(fetch, batches(60)))


class Single(Dataset):
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
        (Single(), False),
        (OutOfDate(), False),
        (Subset(Single(), [3, 1]), False),
        (MultiEpochDatasetResampler(IdentityMultiEpochDatasetWrapper(Single())), False),
    ],
)
def test_which_datasets_are_fetched_ahead(dataset: Any, expected: bool) -> None:
    assert can_be_prefetched(dataset) is expected


class Whole:
    """Samples 0 to 11 in batches of 2."""

    num_samples = end = 12

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        return batches(6, rows=2)


class FromDatabase(Single):
    """SQLite's connections serve the thread that opened them, and no other."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:")

    def __getitem__(self, index: int) -> Any:
        (value,) = self.connection.execute("select ? * 2", (index,)).fetchone()
        return {"x": torch.tensor(value)}


def test_a_dataset_that_is_bound_to_its_thread_stays_there() -> None:
    dataset = MultiEpochDatasetResampler(
        IdentityMultiEpochDatasetWrapper(FromDatabase()), shuffle=False
    )
    found = make_loader(DataLoader(dataset), Whole())
    assert [batch["x"].tolist() for batch in found][-1] == [20, 22]
