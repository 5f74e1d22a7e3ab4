"""Sends what rank 0 decides to all ranks of a job."""

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from megakit.errors import UserError
from megakit.job.cluster import Cluster

T = TypeVar("T")


def share(cluster: Cluster, make: Callable[[], T], timeout: int) -> T:
    """Makes a value on rank 0, and sends it to the other ranks through torch's store.

    Args:
        cluster: The job, and the rank of this process.
        make: Makes the value, which pickle can copy; called on rank 0, before it imports torch.
        timeout: Seconds to wait for another rank.

    Returns:
        The value: on rank 0 that of `make`, on the other ranks a copy.

    Raises:
        UserError: `make` raised an exception; only rank 0 raises the exception itself.
        TimeoutError: A rank did not come in time.
    """
    # Until the log exists, torch's warnings reach the console, e.g. that no name service answers.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_main, sent = cluster.rank == 0, b""
    failure: Exception | None = None
    # The process that hosts the store; with torchrun, its agent does.
    is_host = is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torch's process group uses this store
    attempt = os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")

    def wait(ranks: range, has_come: Callable[[int], bool]) -> None:
        deadline = time.monotonic() + timeout
        while missing := [str(rank) for rank in ranks if not has_come(rank)]:
            if time.monotonic() > deadline:
                raise failure or TimeoutError(
                    f"{cluster.launcher} started {cluster.num_processes} processes, but rank "
                    f"{', '.join(missing)} did not answer within {timeout} s (--timeout) "
                    f"at MASTER_ADDR {host}, MASTER_PORT {port}"
                )
            time.sleep(0.02)  # in Python, which handles signals; torch's C++ code does not

    def is_open(rank: int) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=1).close()
            return True
        return False

    if is_main:
        try:
            value = make()
            sent = pickle.dumps(value)
        except Exception as error:  # the other ranks have to learn that there is no value
            failure = error
    else:
        wait(range(1), is_open)
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # in C++

    own = TCPStore(host, port, is_master=is_host, wait_for_workers=False)
    store: Any = PrefixStore(f"megakit/{attempt}", own)
    Cluster.store = store  # which has to stay alive while the job runs
    if is_main:
        store.set("value", sent)
    wait(range(1), lambda rank: store.check(["value"]))
    received = store.get("value")
    store.set(str(cluster.rank), "")
    if is_host:  # the store ends with this process
        wait(range(cluster.num_processes), lambda rank: store.check([str(rank)]))
    if failure is not None:
        raise failure
    if not received:
        raise UserError([])
    return value if is_main else pickle.loads(received)
