"""Distributes the plan to all ranks of a job, and selects the rank that reports a failure."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.plan import PLAN_VARIABLE, Plan
from megakit.job.store import join_store, join_torchruns_store


def share_plan(
    cluster: Cluster, make: Callable[[], tuple[Plan, Any]], timeout: int
) -> tuple[Plan, Any]:
    """Makes the plan on rank 0 of a job under torchrun or srun, and sends it to the other ranks.

    Also sets the environment variables that our own launcher sets.

    Args:
        cluster: The job, and the rank of this process.
        make: Makes the plan; called on rank 0.
        timeout: Seconds to wait for another rank.

    Returns:
        The plan, and objects that have to stay alive while the job runs.

    Raises:
        UserError: Rank 0 found problems; only rank 0's error lists them.
        OSError: The ranks could not connect, or not in time.
    """
    if cluster.launcher == "srun":
        os.environ.update(cluster.torchrun_variables())
    # Without this, every rank would use all cores. torchrun sets the same default.
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    # Until the log exists, torch's warnings reach the console, e.g. that no name service answers.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed import DistError

    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if is_torchruns and cluster.launcher == "torchrun":
            store = join_torchruns_store(cluster, timeout)
            return _share_through(store, cluster, make, timeout, is_hosted=False)
        with join_store(cluster, timeout) as store:
            return _share_through(store, cluster, make, timeout, is_hosted=True)
    except DistError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConnectionError(f"The ranks cannot connect: {reason}") from None


def _share_through(
    store: Any,
    cluster: Cluster,
    make: Callable[[], tuple[Plan, Any]],
    timeout: int,
    is_hosted: bool,
) -> tuple[Plan, Any]:
    """Exchanges the plan through a store; `is_hosted` means that rank 0 hosts the store."""
    # torchrun keeps its store when it restarts failed ranks. Restarted ranks need a new plan, so
    # each restart uses another key.
    key = f"{PLAN_VARIABLE}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if cluster.rank != 0:
        if not _wait_for_keys(store, [key], timeout):
            raise TimeoutError(f"Rank 0 sent no plan within {timeout} s (--timeout)")
        text = store.get(key).decode()
        store.set(f"{key}/{cluster.rank}", "")
        if not text:
            raise UserError([])
        return Plan.from_json(text), store
    text = ""
    try:
        plan, locks = make()
        text = plan.to_json()
    finally:
        store.set(key, text)
        # A hosted store ends with this process, so this process waits until all ranks have read.
        others = [f"{key}/{rank}" for rank in range(1, cluster.num_processes) if is_hosted]
        is_complete = _wait_for_keys(store, others, timeout)
    if not is_complete:
        missing = [name.rpartition("/")[2] for name in others if not store.check([name])]
        raise TimeoutError(
            f"{cluster.launcher} starts {cluster.num_processes} processes, but rank "
            f"{', '.join(missing)} did not connect within {timeout} s (--timeout)"
        )
    return plan, (locks, store)


def _wait_for_keys(store: Any, keys: list[str], timeout: int) -> bool:
    """Waits until a store has all keys; returns False after the timeout.

    The loop is in Python, because Python handles no signals during a wait in torch's C++ code.
    """
    deadline = time.monotonic() + timeout
    while keys and not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def has_process_group() -> bool:
    """Returns whether the job's default process group is initialized."""
    if "torch" not in sys.modules:
        return False
    from torch import distributed as dist

    return bool(dist.is_initialized())


def is_first_to_fail() -> bool:
    """Returns whether this rank is the first to fail; the first failure causes later failures."""
    if not has_process_group():  # no other rank waits for this rank
        return True
    from torch import distributed as dist

    if dist.get_world_size() == 1:
        return True
    counts: list[int] = []

    def count_failure() -> None:
        # An error means that the rank that hosts the store has ended and has reported the reason.
        with contextlib.suppress(RuntimeError):
            counts.append(dist.distributed_c10d._get_default_store().add("megakit/failed", 1))
        counts.append(0)

    # In a thread: if the rank that hosts the store hangs, the C++ code waits forever.
    thread = threading.Thread(target=count_failure, daemon=True)
    thread.start()
    thread.join(timeout=10)
    if not counts:  # rank 0 hangs and made the other ranks fail; only rank 1 reports its error
        return dist.get_rank() == 1
    return counts[0] == 1
