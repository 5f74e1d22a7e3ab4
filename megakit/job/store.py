"""How the ranks of a job find rank 0: at one of a few known ports, where rank 0 names its store.

The store listens at a port that the kernel chooses, so no other program can use it. Only the ranks
of the same job accept the greeting at the known port: another program that listens there is passed
over, and so is another job.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from megakit.errors import UserError
from megakit.job.cluster import Cluster


@contextlib.contextmanager
def join_store(cluster: Cluster, timeout: int) -> Iterator[Any]:
    """Connects this rank to the store of its job; rank 0 hosts the store.

    While the block runs, rank 0 answers ranks that look for the store. Afterwards the environment
    names the store, so that torch's process group uses it as well.

    Args:
        cluster: The job, and this process's place in it.
        timeout: Seconds to wait for rank 0, and for answers of the store.

    Raises:
        UserError: Rank 0 cannot listen, or cannot be reached at the address of the job.
        TimeoutError: Rank 0 was not found in time.
    """
    with contextlib.ExitStack() as stack:
        if cluster.rank == 0:
            listener = stack.enter_context(_listen(cluster))
            store = _store("127.0.0.1", 0, timeout, is_host=True)
            greeting = f"{_name(cluster)} {store.port}\n".encode()
            threading.Thread(target=_greet, args=(listener, greeting), daemon=True).start()
            _check_address(cluster, listener.getsockname()[1])
            # Wakes the thread up; closing alone does not.
            stack.callback(lambda: listener.shutdown(socket.SHUT_RDWR))
        else:
            store = _store(cluster.address, _find_store(cluster, timeout), timeout)
        os.environ["MASTER_PORT"] = str(store.port)
        # torch's words for a store that is there already.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        yield store


def join_torchruns_store(cluster: Cluster, timeout: int) -> Any:
    """Connects this rank to the store of torchrun's agent.

    Raises:
        TimeoutError: The agent does not listen.
    """
    deadline = time.monotonic() + timeout
    address = (cluster.address, cluster.ports[0])
    while True:  # not in C++, which would print its own stack
        try:
            socket.create_connection(address, timeout=1).close()
            return _store(*address, timeout)
        except OSError as error:
            if time.monotonic() > deadline:
                raise _not_found(cluster, timeout, str(error)) from None
            time.sleep(0.1)


def _store(address: str, port: int, timeout: int, is_host: bool = False) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # made in C++

    return TCPStore(
        *(address, port),
        is_master=is_host,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )


def _name(cluster: Cluster) -> str:
    """Returns the text that identifies a job."""
    return f"megakit {cluster.name}/{cluster.num_processes}".replace("\n", " ")


def _listen(cluster: Cluster) -> socket.socket:
    """Listens at the first of the job's ports that is free."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    reason = ""
    for port in cluster.ports:
        try:
            return socket.create_server(
                ("", port),
                family=family,
                dualstack_ipv6=family == socket.AF_INET6,
                backlog=max(128, cluster.num_processes),
            )
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                reason = "another program listens there"
    ports = ", ".join(map(str, cluster.ports))
    raise UserError(
        f"MASTER_PORT {ports}: rank 0 cannot listen at it ({reason}). Set MASTER_PORT to the same "
        "free port for all ranks."
    )


def _greet(listener: socket.socket, greeting: bytes) -> None:
    """Tells everyone who connects where the store is, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            connection.sendall(greeting)


def _check_address(cluster: Cluster, port: int) -> None:
    """Refuses a MASTER_ADDR at which rank 0 itself is not found."""
    try:
        if _ask(cluster, port, seconds=10):
            return
        reason = "another program answers"
    except OSError as error:
        reason = error.strerror or str(error)
    raise UserError(
        f"MASTER_ADDR {cluster.address}: rank 0 does not reach itself there, at port {port} "
        f"({reason}). Set MASTER_ADDR to the name or address of the machine of rank 0."
    )


def _find_store(cluster: Cluster, timeout: int) -> int:
    """Asks at the job's ports, again and again, until rank 0 names the port of its store."""
    deadline = time.monotonic() + timeout
    while True:
        for port in cluster.ports:
            try:
                if found := _ask(cluster, port, seconds=1):
                    return found
                reason = "another program answers"
            except OSError as error:
                reason = str(error)
            if time.monotonic() > deadline:
                raise _not_found(cluster, timeout, reason)
        time.sleep(0.1)


def _ask(cluster: Cluster, port: int, seconds: float) -> int | None:
    """Returns the store's port if rank 0 of this job answers at a port, None if others do."""
    with socket.create_connection((cluster.address, port), timeout=seconds) as connection:
        name, _, answer = connection.recv(1000).decode(errors="replace").strip().rpartition(" ")
    is_ours = name == _name(cluster) and answer.isascii() and answer.isdigit()
    return int(answer) if is_ours and int(answer) < 65_536 else None


def _not_found(cluster: Cluster, timeout: int, reason: str) -> TimeoutError:
    ports = ", ".join(map(str, cluster.ports))
    return TimeoutError(
        f"No rank 0 at {cluster.address}, port {ports}, within {timeout} s (--timeout): {reason}"
    )
