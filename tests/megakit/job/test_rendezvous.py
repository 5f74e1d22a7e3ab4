"""The environment of ranks that srun starts; their jobs are in tests/parallel."""

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from megakit.job import rendezvous
from megakit.job.cluster import Cluster


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
    plan: Any = SimpleNamespace(to_json=lambda: "{}")
    made: Any = (plan, None)
    assert rendezvous.share_plan(cluster, lambda: made, 0)[0] is plan
    assert os.environ["OMP_NUM_THREADS"] == threads
    assert cluster.torchrun_variables().items() <= os.environ.items()
