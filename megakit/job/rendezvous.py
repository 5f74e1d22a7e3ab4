"""What the ranks of a job agree on: the plan, and which of them says why the job failed."""

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


def agree(cluster: Cluster, make: Callable[[], tuple[Plan, Any]], timeout: int) -> tuple[Plan, Any]:
    """Has the first rank of a job that others started make the plan, and all others get it.

    Also gives the environment what our own launcher would have put there.

    Args:
        cluster: What started the job, and this process's place in it.
        make: Makes the plan; called on the first rank.
        timeout: Seconds to wait for another rank.

    Raises:
        UserError: The first rank found problems; only its error lists them.
        OSError: Ranks did not meet, or not in time.
    """
    if cluster.starter == "srun":
        os.environ.update(_as_torchrun_says_it(cluster))
    # Every rank would take all cores; torchrun's default is the same.
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    from torch.distributed import DistError

    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if is_torchruns and cluster.starter == "torchrun":
            store = join_torchruns_store(cluster, timeout)
            return _agree(cluster, make, timeout, store, is_hosted=False)
        with join_store(cluster, timeout) as store:
            return _agree(cluster, make, timeout, store, is_hosted=True)
    except DistError as error:
        raise ConnectionError(
            f"The ranks do not meet: {str(error).splitlines()[0].rstrip('.')}"
        ) from None


def _agree(
    cluster: Cluster,
    make: Callable[[], tuple[Plan, Any]],
    timeout: int,
    store: Any,
    is_hosted: bool,
) -> tuple[Plan, Any]:
    """Exchanges the plan through a store, which rank 0 of the job may host itself."""
    # torchrun keeps its store when it starts failed ranks again, which have to plan anew.
    key = f"{PLAN_VARIABLE}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if cluster.rank != 0:
        if not _are_there(store, [key], timeout):
            raise TimeoutError(f"Rank 0 did not say within {timeout} s (--timeout) what to do")
        text = store.get(key).decode()
        store.set(f"{key}/{cluster.rank}", "")
        if not text:
            raise UserError([])
        return Plan.from_json(text), store
    text = ""
    try:
        plan, guard = make()
        text = plan.to_json()
    finally:
        store.set(key, text)
        # The store ends with this process, maybe at once: all have to have read by then.
        others = [f"{key}/{rank}" for rank in range(1, cluster.num_processes) if is_hosted]
        is_complete = _are_there(store, others, timeout)
    if not is_complete:
        missing = [name.rpartition("/")[2] for name in others if not store.check([name])]
        raise TimeoutError(
            f"{cluster.starter} starts {cluster.num_processes} processes, but rank "
            f"{', '.join(missing)} did not connect within {timeout} s (--timeout)"
        )
    return plan, (guard, store)


def _are_there(store: Any, keys: list[str], timeout: int) -> bool:
    """Waits for keys of a store; not in C++, where no signal would be heard meanwhile."""
    deadline = time.monotonic() + timeout
    while keys and not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def ranks_have_met() -> bool:
    """Whether the job's process group is there."""
    if "torch" not in sys.modules:
        return False
    from torch import distributed as dist

    return bool(dist.is_initialized())


def is_first_to_fail() -> bool:
    """Whether no other rank of the job failed before; the errors of later ones follow from it."""
    if not ranks_have_met():  # nothing that another rank could wait for
        return True
    from torch import distributed as dist

    if dist.get_world_size() == 1:
        return True
    answers: list[int] = []

    def ask() -> None:
        # An error: the rank that hosts the store has ended, and has reported why.
        with contextlib.suppress(RuntimeError):
            answers.append(dist.distributed_c10d._get_default_store().add("megakit/failed", 1))
        answers.append(0)

    # Aside, since a host that hangs never answers, and C++ waits for ever.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout=10)
    if not answers:  # the others failed because the first rank does not answer: one says so
        return dist.get_rank() == 1
    return answers[0] == 1


def _as_torchrun_says_it(cluster: Cluster) -> dict[str, str]:
    """Slurm's words for a rank's place in torchrun's, which all libraries understand."""
    return {
        "RANK": str(cluster.rank),
        "LOCAL_RANK": str(cluster.local_rank),
        "GROUP_RANK": str(cluster.node),
        "WORLD_SIZE": str(cluster.devices * cluster.num_nodes),
        "LOCAL_WORLD_SIZE": str(cluster.devices),
        "MASTER_ADDR": cluster.address,
    }
