"""Data loader workers: whether their batches have room, and how the job hears of their end."""

import os
import signal
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from megakit.data.loader import make_loader
from megakit.errors import UserError
from megakit.runtime.shared_memory import size_in_shared_memory, why_worker_ended
from tests.scripts import REPOSITORY, run


class Numbers(Dataset):
    """Batches of numbers; a worker does something else instead."""

    def __init__(self, in_worker=lambda: None):
        self.in_worker = in_worker

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"number": torch.tensor(float(index)), "more": self.worker_s()}

    def worker_s(self):
        return 0 if get_worker_info() is None else self.in_worker()

    def get_batch(self, indices):
        return {"number": torch.from_numpy(indices), "more": self.worker_s()}


class Batches:
    num_samples = end = 40

    def __len__(self):
        return 10

    def __iter__(self):
        for first in range(0, 40, 4):
            yield np.arange(first, first + 4)


def loader(in_worker=lambda: None, **options: Any) -> DataLoader:
    given: Any = {"num_workers": 2, **options}
    return make_loader(DataLoader(Numbers(in_worker), **given), Batches())


def end_of(in_worker, **options):
    """What the main process says of its workers, and how long it waited for them."""
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        list(loader(in_worker, **options))
    assert time.monotonic() - began < 30
    said = why_worker_ended(caught.value)
    assert said is not None
    return said


class TestRoom:
    def test_sizes(self):
        """Whole pages, what a view is a view of, and nothing twice."""
        long = torch.zeros(3000)
        batch = {"a": long[:10], "b": [long, (torch.zeros(1), "text")], "c": np.zeros(10**6)}
        assert size_in_shared_memory(batch) == 3 * 4096 + 4096

    def test_batches_that_have_no_room(self):
        """Waiting for them would take for ever."""
        with pytest.raises(UserError) as caught:
            loader(prefetch_factor=10**12)
        (problem,) = caught.value.problems
        assert problem.startswith("--num-workers 2: the batches of the workers need up to")
        assert "/dev/shm had " in problem

    def test_every_rank_of_the_machine_counts(self, monkeypatch):
        status = os.statvfs("/dev/shm")
        pages = status.f_bavail * status.f_frsize // 4096
        half = loader(prefetch_factor=pages // 2 // 2 - 2)
        del half
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        with pytest.raises(UserError, match="of 3 ranks"):
            loader(prefetch_factor=pages // 2 // 2 - 2)

    def test_the_loaders_of_training_and_validation_count_together(self):
        status = os.statvfs("/dev/shm")
        pages = status.f_bavail * status.f_frsize // 4096
        first = loader(prefetch_factor=pages * 2 // 3 // 2)
        with pytest.raises(UserError):
            loader(prefetch_factor=pages * 2 // 3 // 2)
        del first
        loader(prefetch_factor=pages * 2 // 3 // 2)

    def test_without_workers_nothing_is_fetched_ahead_of_time(self):
        assert len(list(loader(prefetch_factor=None, num_workers=0))) == 10


class TestEnds:
    @pytest.mark.parametrize("name", ["SIGBUS", "SIGKILL", "SIGSEGV"])
    def test_a_signal(self, name):
        def kill():
            time.sleep(0.2)  # torch does not look at workers that end before all have begun
            os.kill(os.getpid(), getattr(signal, name))

        said = end_of(kill)
        assert f"was killed by {name}" in said
        assert ("/dev/shm has" in said) == (name == "SIGBUS")
        assert said.startswith("data loader worker (pid ")

    def test_a_batch_that_cannot_be_handed_over(self):
        """Python drops it, and the main process would wait for it for ever."""
        said = end_of(lambda: lambda: "a lambda cannot be pickled")
        assert "could not send a batch, and /dev/shm has" in said

    def test_an_exit(self):
        assert "ended unexpectedly" in end_of(lambda: os._exit(3))

    def test_a_worker_that_hangs(self):
        said = end_of(lambda: time.sleep(3), timeout=1)
        assert said == "no data loader worker delivered a batch within 1 s"

    def test_a_user_s_own_set_up_of_workers(self):
        marked = loader(lambda: 1, worker_init_fn=_count)
        assert [batch["more"] for batch in marked] == [1] * 10

    def test_workers_that_hang_are_waited_for_no_longer_than_this(self):
        assert loader().timeout == 600
        assert loader(timeout=3).timeout == 3

    @pytest.mark.parametrize(
        "error",
        [
            ValueError("x"),
            RuntimeError("Caught KeyError in DataLoader worker process 0."),
            OSError(),
        ],
    )
    def test_other_errors_are_none_of_theirs(self, error):
        assert why_worker_ended(error) is None

    def test_causes_that_are_each_other_s(self):
        first, second = ValueError("x"), ValueError("y")
        first.__cause__, second.__cause__ = second, first
        assert why_worker_ended(first) is None

    def test_the_cause_of_another_error(self):
        error = ValueError("in the loop")
        error.__context__ = RuntimeError("DataLoader timed out after 7 seconds")
        assert why_worker_ended(error) == "no data loader worker delivered a batch within 7 s"


def _count(number: int) -> None:
    assert number in (0, 1)


def in_mount(size, *command):
    """Runs a command with a /dev/shm of its own."""
    mount = f"mount -t tmpfs -o size={size} none /dev/shm && exec $0 $@"
    alone = ("unshare", "-m", "sh", "-c", mount)
    if run(*alone, "true").status:
        pytest.skip("nothing can be mounted here")
    return run(*alone, sys.executable, *command, timeout=120, PYTHONPATH=str(REPOSITORY))


GROWING = """
import numpy, torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from megakit.data.loader import make_loader
from megakit.runtime.shared_memory import why_worker_ended

class Growing(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.zeros(1 if get_worker_info() is None else 2**20)

class Batches(list):
    num_samples = end = 40

try:
    batches = Batches([numpy.arange(4)] * 10)
    list(make_loader(DataLoader(Growing(), num_workers=2), batches))
except RuntimeError as error:
    print(why_worker_ended(error))
"""


@pytest.mark.long
def test_shared_memory_that_fills_up(tmp_path):
    """Batches of workers that are larger than the first one was."""
    script = tmp_path / "script.py"
    script.write_text(GROWING)
    done = in_mount("64k", script)
    assert "could not send a batch, and /dev/shm has" in done.out, done.err
    assert "of 65,536 bytes free" in done.out


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "arguments"),
    [
        ("64k", ("--num-workers", 2)),
        ("64m", ("--num-workers", 4, "--global-batch-size", 11_000)),
        ("1000k", ("--num-workers", 2, "--devices", 2)),
    ],
)
def test_a_script_in_a_small_container(tmp_path, size, arguments):
    done = in_mount(
        *(size, "model_pretrain.py", "--dataset", "digits", "--accelerator", "cpu"),
        *("--max-steps", 2, "--output-dir", tmp_path, *arguments),
    )
    assert done.status == 2, done.err
    assert done.err.count("model_pretrain.py: --num-workers ") == 1
    assert "Traceback" not in done.err
