"""From a sampler's indices to batches: one way or the other, with workers or without."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from megakit.data.loader import WORKER_TIMEOUT, make_loader
from megakit.testing import assert_elements_equal
from tests.scripts import Result, run_python

PADDING = -1


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


class Broken(BatchedSquares):
    """Its two ways differ, so that one can tell which was taken."""

    def get_batch(self, indices):
        return {"square": torch.zeros(len(indices), 3), "idx": torch.from_numpy(indices)}


class Batches:
    """Indices 0, 1, 2, ... in batches of 4; what is past the end is padding."""

    def __init__(self, num_samples=10, end=12):
        self.num_samples, self.end = num_samples, end

    def __len__(self):
        return self.end // 4

    def __iter__(self):
        for first in range(0, self.end, 4):
            indices = np.arange(first, first + 4)
            yield np.where(indices < self.num_samples, indices, PADDING)


def whole_batches() -> Batches:
    return Batches(8, 8)


def loader(dataset: Any, sampler: Any, mark_padding: bool = False, **options: Any) -> DataLoader:
    return make_loader(DataLoader(dataset, **options), sampler, mark_padding)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset_class", [Squares, BatchedSquares])
def test_samples_and_batches_give_the_same_with_any_workers(dataset_class, num_workers):
    found = list(loader(dataset_class(), whole_batches(), num_workers=num_workers))
    expected = [default_collate([Squares()[i] for i in batch]) for batch in whole_batches()]
    assert_elements_equal(found, expected)


def test_whole_batches_are_preferred():
    (first, _) = loader(Broken(), whole_batches())
    assert first["square"].sum() == 0


def as_list(samples):
    """A collate_fn: the samples' squares, as Python's numbers."""
    assert isinstance(samples, list)
    return {"squares": [sample["square"][0].item() for sample in samples]}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_fn_is_respected(num_workers):
    found = loader(Broken(), whole_batches(), num_workers=num_workers, collate_fn=as_list)
    assert list(found) == [{"squares": [0, 1, 4, 9]}, {"squares": [16, 25, 36, 49]}]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [None, default_collate])
def test_padding_is_marked(num_workers, collate_fn):
    found = list(loader(Squares(), Batches(), True, num_workers=num_workers, collate_fn=collate_fn))
    weights = torch.stack([batch["loss_mask"] for batch in found])
    assert weights.dtype == torch.float32
    assert weights.mean().item() == pytest.approx(1)
    assert weights[-1].tolist() == pytest.approx([1.2, 1.2, 0, 0])
    idx = torch.cat([batch["idx"] for batch in found])
    assert idx[weights.flatten() > 0].tolist() == list(range(10))
    assert idx[-2:].tolist() == [0, 0]  # real samples, only without weight


class Tokens(Squares):
    """Has a mask of its own, and hands out the same tensor again and again."""

    def __init__(self):
        self.mask = torch.tensor([[1.0, 0.0]] * 12)

    def get_batch(self, indices):
        return {"loss_mask": self.mask[: len(indices)]}


def test_a_datasets_own_mask_is_weighted():
    dataset = Tokens()
    *_, last = loader(dataset, Batches(), True)
    expected = torch.tensor([[1.2, 0.0], [1.2, 0.0], [0.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(last["loss_mask"], expected)
    assert dataset.mask.tolist() == [[1.0, 0.0]] * 12


class Pairs(Squares):
    def __getitem__(self, index):
        return index, index**2


def test_an_evaluation_batch_has_to_be_a_dictionary():
    with pytest.raises(TypeError, match=r"evaluation batch is a list; .* Return dicts"):
        next(iter(loader(Pairs(), Batches(), True)))
    assert len(list(loader(Pairs(), whole_batches()))) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_global_generator_is_left_alone(num_workers):
    """Else dropout would depend on the number of workers."""
    before = torch.get_rng_state()
    list(loader(Squares(), whole_batches(), num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before)


def greet(worker_id):
    Squares.greeting = f"worker {worker_id}"  # type: ignore[attr-defined]


class Greetings(Squares):
    def get_batch(self, indices):
        return {"greeting": [getattr(Squares, "greeting", None)]}


def test_workers_are_set_up_as_the_template_says():
    options: dict[str, Any] = {
        "num_workers": 1,
        "worker_init_fn": greet,
        "persistent_workers": True,
    }
    batches = loader(Greetings(), whole_batches(), prefetch_factor=5, **options)
    assert [batch["greeting"] for batch in batches] == [["worker 0"], ["worker 0"]]
    assert (batches.prefetch_factor, batches.persistent_workers) == (5, True)
    assert batches.timeout == WORKER_TIMEOUT  # a hanging worker ends the job
    assert loader(Greetings(), whole_batches(), pin_memory=True).pin_memory
    assert [batch["greeting"] for batch in loader(Greetings(), whole_batches())] == [[None]] * 2


LEFT_OPEN = """
import multiprocessing
import os
import time
import numpy as np
from torch.utils.data import DataLoader, Dataset, _utils
from megakit.data.loader import make_loader

_utils.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds that torch waits for each worker; they are 5

class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index >= HANGS_AT:
            time.sleep(600)
        return index

class Batches(list):
    num_samples = end = 40

batches = Batches(np.arange(40).reshape(10, 4))
loader = make_loader(DataLoader(Numbers(), num_workers=2, persistent_workers=True), batches)
kept = iter(loader)  # as a notebook's variables, or the traceback of an error, keep it
assert next(kept).tolist() == [0, 1, 2, 3]
if ENDS_AT_ONCE:
    print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    os._exit(3)
raise KeyError("a user's error")
"""


def leave_open(hangs_at: int, ends_at_once: bool) -> Result:
    """Runs a program that ends while it has workers; returns when no worker is left."""
    choices = f"HANGS_AT, ENDS_AT_ONCE = {hangs_at}, {ends_at_once}"
    return run_python("-c", f"{choices}\n{LEFT_OPEN}", timeout=120)


def test_a_program_ends_whose_iterator_is_left_open():
    """Workers ignore the signal by which Python ends them, and Python waits for them."""
    done = leave_open(40, ends_at_once=False)
    assert done.status == 1
    assert done.err.splitlines()[-1] == 'KeyError: "a user\'s error"'


def test_workers_that_hang_end_with_a_program_that_ends_at_once():
    """As the scripts end, and as SIGKILL ends them; the pipe is closed when no worker is left."""
    done = leave_open(8, ends_at_once=True)
    assert done.status == 3, done.err
    assert len(done.out.split()) == 2
