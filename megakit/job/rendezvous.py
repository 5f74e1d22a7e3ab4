"""Sends the plan of rank 0 to all ranks of a job."""

import os
import pickle
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from megakit.errors import UserError
from megakit.job.cluster import Cluster

KEY = "megakit/plan"


def share(cluster: Cluster, make: Callable[[], Any], timeout: int) -> tuple[Any, Any]:
    """Makes the plan on rank 0, and sends it to the other ranks through torch's store.

    Args:
        cluster: The job, and the rank of this process.
        make: Makes the plan and the locks; called on rank 0, before this rank imports torch.
        timeout: Seconds to wait for another rank.

    Returns:
        The plan, and objects that have to stay alive while the job runs.

    Raises:
        UserError: Rank 0 found problems; only rank 0's error lists them.
        OSError: The ranks could not connect, or not in time, or two ranks have the same GPU.
    """
    # Until the log exists, torch's warnings reach the console, e.g. that no name service answers.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else by torchrun
    plan, failure = None, None
    if cluster.rank == 0:
        try:
            plan = make()
        except Exception as error:  # the other ranks have to learn that there is no plan
            failure = error
    store = _join_store(cluster, timeout, is_hosted)
    key = f"{KEY}/{os.environ['TORCHELASTIC_RESTART_COUNT']}"  # a restart needs a new plan
    if cluster.rank == 0:
        store.set(key, pickle.dumps(plan))
        readers = range(1, cluster.num_processes) if is_hosted else range(0)
        missing = _wait(store, [f"{key}/{rank}" for rank in readers], timeout)
        if failure is not None:
            raise failure
        if missing:
            numbers = ", ".join(name.rpartition("/")[2] for name in missing)
            raise TimeoutError(
                f"{cluster.launcher} starts {cluster.num_processes} processes, but rank {numbers} "
                f"did not connect within {timeout} s (--timeout)"
            )
    else:
        if _wait(store, [key], timeout):
            raise TimeoutError(f"Rank 0 has not ended its checks within {timeout} s (--timeout)")
        plan = pickle.loads(store.get(key))
        store.set(f"{key}/{cluster.rank}", "")
    if plan is None:
        raise UserError([])
    if cluster.launcher == "torchrun" and cluster.num_gpus and plan.accelerator.name == "gpu":
        gpu = os.environ["CUDA_VISIBLE_DEVICES"]
        if store.add(f"{key}/{cluster.rank // cluster.devices}/GPU {gpu}", 1) > 1:
            raise ConnectionError(
                f"CUDA_VISIBLE_DEVICES={gpu}: another process of this machine has the same value, "
                "and each process needs its own GPU. Set it for each process, or unset it"
            )
    return plan, store


def _join_store(cluster: Cluster, timeout: int, is_hosted: bool) -> Any:
    """Connects this rank to the store of the job, which rank 0 or torchrun's agent hosts.

    The environment is set such that torch's process group uses the same store.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # made in C++

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
    is_host = is_hosted and cluster.rank == 0
    deadline = time.monotonic() + timeout
    while not is_host:  # in Python, which handles signals meanwhile; torch's C++ code does not
        try:
            socket.create_connection((address, port), timeout=1).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"No rank 0 at {address}, port {port}, within {timeout} s (--timeout): {error}"
                ) from None
            time.sleep(0.1)
    try:
        return TCPStore(
            *(address, port),
            is_master=is_host,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConnectionError(
            f"MASTER_ADDR {address}, MASTER_PORT {port}: the ranks cannot connect: {reason}"
        ) from None


def _wait(store: Any, keys: list[str], timeout: int) -> list[str]:
    """Waits until a store has all keys; returns the keys that are missing after the timeout."""
    deadline = time.monotonic() + timeout
    while keys and not store.check(keys):
        if time.monotonic() > deadline:
            return [key for key in keys if not store.check([key])]
        time.sleep(0.02)
    return []
