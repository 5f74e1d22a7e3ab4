"""What the ranks of a job agree on: the plan, and which of them says why the job failed."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from megakit.errors import UserError
from megakit.training.layout import Cluster
from megakit.training.plan import PLAN_VARIABLE, Plan


def agree(cluster: Cluster, make: Callable[[], tuple[Plan, Any]], timeout: int) -> tuple[Plan, Any]:
    """Has the first rank of a job that others started make the plan, and all others get it.

    Also gives the environment what our own launcher would have put there.

    Args:
        cluster: What started the job, and this process's place in it.
        make: Makes the plan; called on the first rank.
        timeout: Seconds to wait for another rank.

    Raises:
        UserError: The first rank found problems; it carries them, the other ranks' is silent.
        OSError: Ranks did not meet, or not in time.
    """
    if cluster.starter == "srun":
        os.environ.update(_as_torchrun_says_it(cluster))
    # Every rank would take all cores; torchrun's default is the same.
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    from torch.distributed import DistError

    has_host = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = cluster.rank == 0 and not has_host
    # torchrun keeps its store when it starts failed ranks again, which have to plan anew.
    key = f"{PLAN_VARIABLE}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    text = ""
    try:
        store = _meet(hosts, has_host, timeout)
        if cluster.rank != 0:
            if not _are_there(store, [key], timeout):
                raise TimeoutError(f"Rank 0 did not say within {timeout} s (--timeout) what to do")
            text = store.get(key).decode()
            store.set(f"{key}/{cluster.rank}", "")
            if not text:
                raise UserError([])
            return Plan.from_json(text), store
        try:
            plan, guard = make()
            text = plan.to_json()
        finally:
            store.set(key, text)
            # The store ends with this process, maybe at once: all have to have read by then.
            others = [f"{key}/{rank}" for rank in range(1, cluster.num_processes)] if hosts else []
            is_complete = _are_there(store, others, timeout)
    except DistError as error:
        raise ConnectionError(
            f"The ranks do not meet: {str(error).splitlines()[0].rstrip('.')}"
        ) from None
    if not is_complete:
        missing = [name.rpartition("/")[2] for name in others if not store.check([name])]
        raise TimeoutError(
            f"{cluster.starter} speaks of {cluster.num_processes} processes, but after {timeout} s "
            f"(--timeout) rank {', '.join(missing)} was not there"
        )
    return plan, (guard, store)


def _meet(hosts: bool, has_host: bool, timeout: int) -> Any:
    """The store through which ranks agree: torchrun's, or one that the first rank hosts."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # made in C++

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not has_host:
        port = port + 10_000 if port < 50_000 else port - 10_000  # that one is the process group's
    if not hosts:
        _wait_for_host(address, port, timeout)
    return TCPStore(
        *(address, port),
        is_master=hosts,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )


def _wait_for_host(address: str, port: int, timeout: int) -> None:
    """Waits for the store to be there: in Python as well, and C++ would print its own stack."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"No rank 0 at {address}, port {port}, within {timeout} s (--timeout): {error}"
                ) from None
            time.sleep(0.1)


def _are_there(store: Any, keys: list[str], timeout: int) -> bool:
    """Waits for keys of a store; not in C++, where no signal would be heard meanwhile."""
    deadline = time.monotonic() + timeout
    while keys and not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_first_to_fail() -> bool:
    """Whether no other rank of the job failed before; the errors of later ones follow from it."""
    if "torch" not in sys.modules:  # nothing that another rank could wait for
        return True
    from torch import distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    answers: list[int] = []

    def ask() -> None:
        # An error: the store went with the rank that hosts it, which had its own say.
        with contextlib.suppress(RuntimeError):
            answers.append(dist.distributed_c10d._get_default_store().add("megakit/failed", 1))
        answers.append(0)

    # Aside, since a host that hangs never answers, and C++ waits for ever.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout=10)
    if not answers:  # the first rank is what the others failed of: one of them says so
        return dist.get_rank() == 1
    return answers[0] == 1


def _as_torchrun_says_it(cluster: Cluster) -> dict[str, str]:
    """Slurm's words for a rank's place in torchrun's, which all libraries understand."""
    from lightning.fabric.plugins.environments import SLURMEnvironment

    env = os.environ
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    nodes = next((env[name] for name in names if env.get(name)), "127.0.0.1")
    # A port of its own for each step of each job.
    number = int(env.get("SLURM_JOB_ID", "0")) + 1000 * int(env.get("SLURM_STEP_ID", "0"))
    return {
        "RANK": str(cluster.rank),
        "LOCAL_RANK": env.get("SLURM_LOCALID", str(cluster.rank % cluster.devices)),
        "GROUP_RANK": env.get("SLURM_NODEID", str(cluster.rank // cluster.devices)),
        "WORLD_SIZE": str(cluster.devices * cluster.num_nodes),
        "LOCAL_WORLD_SIZE": str(cluster.devices),
        "MASTER_ADDR": env.get("MASTER_ADDR", SLURMEnvironment.resolve_root_node_address(nodes)),
        "MASTER_PORT": env.get("MASTER_PORT", str(15_000 + number % 10_000)),
    }
