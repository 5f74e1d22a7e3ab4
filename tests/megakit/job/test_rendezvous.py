"""How the plan reaches the ranks, and which rank reports a failure; jobs are in tests/parallel."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from torch import distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from megakit.errors import UserError
from megakit.job import rendezvous
from megakit.job.cluster import Cluster
from megakit.job.plan import Plan
from tests.megakit.job.test_plan import PLAN
from tests.scripts import REPOSITORY, run


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No job around this test, and none after it."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or name == "OMP_NUM_THREADS":
            monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def share(store: Any, rank: int, make: Any = None, timeout: int = 20, **options: Any) -> Any:
    cluster = Cluster("srun", rank=rank, devices=options.pop("devices", 2))
    return rendezvous._share_through(
        store, cluster, make, timeout, **{"is_hosted": True, **options}
    )


def made() -> tuple[Plan, str]:
    return PLAN, "locks"


def test_the_plan_of_rank_0_reaches_the_others() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(share, store, rank, devices=3) for rank in (1, 2)]
        assert share(store, 0, made, devices=3) == (PLAN, ("locks", store))
        assert [other.result(timeout=20)[0] for other in others] == [PLAN] * 2


def test_rank_0_alone_tells_why_it_refuses() -> None:
    def refuse() -> NoReturn:
        raise UserError("--lr 0: has to be positive")

    store = HashStore()
    with ThreadPoolExecutor() as pool:
        other = pool.submit(share, store, 1)
        with pytest.raises(UserError, match="--lr 0"):
            share(store, 0, refuse)
        with pytest.raises(UserError) as caught:
            other.result(timeout=20)
    assert caught.value.problems == []


def test_restarted_ranks_wait_for_a_plan_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps its store. As it is not this job's, rank 0 waits for nobody."""
    store = HashStore()
    share(store, 0, made, timeout=0, is_hosted=False)
    assert share(store, 1, timeout=0)[0] == PLAN
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(TimeoutError, match=r"Rank 0 sent no plan within 0 s \(--timeout\)"):
        share(store, 1, timeout=0)


def test_ranks_that_do_not_come_are_named() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        other = pool.submit(share, store, 2, devices=4)
        said = "srun starts 4 processes, but rank 1, 3 did not connect within 1 s"
        with pytest.raises(TimeoutError, match=said):
            share(store, 0, made, timeout=1, devices=4)
        assert other.result(timeout=20)[0] == PLAN


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({}, "1"),
        ({"SLURM_CPUS_PER_TASK": "4"}, "4"),
        ({"SLURM_CPUS_PER_TASK": "4", "OMP_NUM_THREADS": "3"}, "3"),
    ],
)
def test_a_rank_of_srun_has_the_variables_of_our_own_launcher(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], threads: str
) -> None:
    monkeypatch.setattr(
        rendezvous, "join_store", lambda cluster, timeout: contextlib.nullcontext(HashStore())
    )
    os.environ.update(given)
    cluster = Cluster("srun", address="node1")
    assert rendezvous.share_plan(cluster, made, 0)[0] == PLAN
    assert os.environ["OMP_NUM_THREADS"] == threads
    assert cluster.torchrun_variables().items() <= os.environ.items()


ALONE = """
from types import SimpleNamespace
from megakit.job.cluster import Cluster
from megakit.job.rendezvous import share_plan
from megakit.runtime.loopback import ensure_loopback

ensure_loopback()
plan = SimpleNamespace(to_json=lambda: "{}")
cluster = Cluster("srun", address="127.0.0.1", ports=(29500,))  # a network of its own
share_plan(cluster, lambda: (plan, None), 20)
"""


def test_no_word_of_a_missing_name_service() -> None:
    if run("unshare", "--net", "true").status:
        pytest.skip("no network namespace can be made here")
    alone = run("unshare", "--net", sys.executable, "-c", ALONE, cwd=REPOSITORY)
    assert (alone.status, alone.err) == (0, "")


class TestFirstToFail:
    @pytest.fixture
    def in_job(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        """A job of two ranks, as far as torch can tell."""
        job = SimpleNamespace(store=HashStore(), size=2, rank=0)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: job.size)
        monkeypatch.setattr(dist, "get_rank", lambda: job.rank)
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: job.store)
        return job

    def test_without_other_ranks(self, in_job: SimpleNamespace) -> None:
        in_job.size = 1
        assert [rendezvous.is_first_to_fail() for _ in range(2)] == [True, True]

    def test_before_the_ranks_have_met(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: False)
        assert rendezvous.is_first_to_fail()

    def test_one_rank_of_several(self, in_job: SimpleNamespace) -> None:
        assert [rendezvous.is_first_to_fail() for _ in range(3)] == [True, False, False]

    def test_after_the_end_of_the_rank_that_hosts_the_store(self, in_job: SimpleNamespace) -> None:
        def add(*arguments: object) -> NoReturn:
            raise RuntimeError("Connection reset by peer")

        in_job.store, in_job.rank = SimpleNamespace(add=add), 1
        assert not rendezvous.is_first_to_fail()

    @pytest.mark.parametrize("rank", [1, 2])
    def test_where_that_rank_hangs(
        self, in_job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, rank: int
    ) -> None:
        """One of those that wait for it reports it."""
        join = threading.Thread.join
        monkeypatch.setattr(threading.Thread, "join", lambda thread, timeout: join(thread, 0.1))
        released = threading.Event()
        in_job.store, in_job.rank = SimpleNamespace(add=lambda *_: released.wait(60)), rank
        assert rendezvous.is_first_to_fail() == (rank == 1)
        released.set()
