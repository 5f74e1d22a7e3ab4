"""Connects the ranks of a job to the store of rank 0.

Rank 0 listens at one of a few ports that all ranks know, and there names the port of its store. The
kernel chooses the port of the store, so no other program uses it. The greeting at the known port
names the job, so ranks skip a known port at which another program or another job answers.
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

    Until the end of the block, rank 0 sends the port of the store to every rank that connects.
    Environment variables make torch's process group use the same store.

    Args:
        cluster: The job, and the rank of this process.
        timeout: Seconds to wait for rank 0, and for answers of the store.

    Raises:
        UserError: Rank 0 cannot listen, or cannot connect to itself at the address of the job.
        TimeoutError: Rank 0 was not found in time.
    """
    with contextlib.ExitStack() as stack:
        if cluster.rank == 0:
            listener = stack.enter_context(_listen(cluster))
            store = _store("127.0.0.1", 0, timeout, is_host=True)
            greeting = f"{_job_name(cluster)} {store.port}\n".encode()
            threading.Thread(target=_serve, args=(listener, greeting), daemon=True).start()
            _check_address(cluster, listener.getsockname()[1])
            # `shutdown` wakes up the thread; `close` alone does not.
            stack.callback(lambda: listener.shutdown(socket.SHUT_RDWR))
        else:
            store = _store(cluster.address, _find_port(cluster, timeout), timeout)
        os.environ["MASTER_PORT"] = str(store.port)
        # This makes torch connect to the existing store instead of hosting another one.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        yield store


def join_torchruns_store(cluster: Cluster, timeout: int) -> Any:
    """Connects this rank to the store of torchrun's agent.

    Raises:
        TimeoutError: The agent does not listen.
    """
    deadline = time.monotonic() + timeout
    address = (cluster.address, cluster.ports[0])
    while True:  # waiting in Python: torch's C++ code would print a C++ stack trace
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


def _job_name(cluster: Cluster) -> str:
    """Returns the text that identifies a job in the greeting."""
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


def _serve(listener: socket.socket, greeting: bytes) -> None:
    """Sends the port of the store to every process that connects, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            connection.sendall(greeting)


def _check_address(cluster: Cluster, port: int) -> None:
    """Raises `UserError` if rank 0 cannot connect to itself at MASTER_ADDR."""
    try:
        if _request_port(cluster, port, seconds=10):
            return
        reason = "another program answers"
    except OSError as error:
        reason = error.strerror or str(error)
    raise UserError(
        f"MASTER_ADDR {cluster.address}: rank 0 does not reach itself there, at port {port} "
        f"({reason}). Set MASTER_ADDR to the name or address of the machine of rank 0."
    )


def _find_port(cluster: Cluster, timeout: int) -> int:
    """Tries the job's ports repeatedly until rank 0 sends the port of its store."""
    deadline = time.monotonic() + timeout
    while True:
        for port in cluster.ports:
            try:
                if found := _request_port(cluster, port, seconds=1):
                    return found
                reason = "another program answers"
            except OSError as error:
                reason = str(error)
            if time.monotonic() > deadline:
                raise _not_found(cluster, timeout, reason)
        time.sleep(0.1)


def _request_port(cluster: Cluster, port: int, seconds: float) -> int | None:
    """Returns the store's port if rank 0 of this job answers at a port; otherwise None."""
    with socket.create_connection((cluster.address, port), timeout=seconds) as connection:
        name, _, answer = connection.recv(1000).decode(errors="replace").strip().rpartition(" ")
    is_ours = name == _job_name(cluster) and answer.isascii() and answer.isdigit()
    return int(answer) if is_ours and int(answer) < 65_536 else None


def _not_found(cluster: Cluster, timeout: int, reason: str) -> TimeoutError:
    ports = ", ".join(map(str, cluster.ports))
    return TimeoutError(
        f"No rank 0 at {cluster.address}, port {ports}, within {timeout} s (--timeout): {reason}"
    )
