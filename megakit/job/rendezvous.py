"""Sends what rank 0 decides to all ranks of a job."""

import contextlib
import json
import os
import pickle
import socket
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from typing import Any, TypeVar

from megakit.errors import UserError
from megakit.job.cluster import PATIENCE, Cluster, timely
from megakit.job.launch import reserved_port
from megakit.job.option_types import flag
from megakit.job.options import CommonOptions

T = TypeVar("T")


def share(
    cluster: Cluster, make: Callable[[], T], check: Callable[[T], str], options: CommonOptions
) -> T:
    """Makes a value on rank 0, and sends it to the other ranks through torch's store.

    Args:
        cluster: The job, and the rank of this process.
        make: Makes the value, which pickle can copy; called on rank 0, before it imports torch.
        check: Returns why another rank cannot use the value, or nothing; called on that rank.
        options: The options of this rank, which have to be those of rank 0.

    Returns:
        The value: on rank 0 that of `make`, on the other ranks a copy.

    Raises:
        UserError: The ranks cannot form a job. Or `make` raised an exception; only rank 0 raises
            the exception itself.
        TimeoutError: A rank did not come in time.
    """
    # Until the log exists, torch's warnings reach the console, e.g. that no name service answers.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_main, sent = cluster.rank == 0, b""
    failure: Exception | None = None
    # The process that hosts the store; with torchrun, its agent does.
    is_host = is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    attempt = os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
    machine, address = socket.gethostname(), _resolve(host)
    place = f"MASTER_ADDR {host} ({address}), MASTER_PORT {port}"
    is_apart = cluster.num_nodes > 1 and not address.startswith(LOOPBACK)
    # A relative --output-dir depends on where a rank was started; `check` compares the folders.
    names = {one.name for one in fields(options)} - {"output_dir"}
    given = {flag(name): str(getattr(options, name)) for name in names}
    of_slurm = ("SLURM_JOB_ID", "SLURM_STEP_ID") if cluster.launcher == "srun" else ()
    job = [str(cluster.num_processes), *(os.environ[name] for name in of_slurm)]
    deadline = time.monotonic() + options.timeout

    def wait(ranks: range, has_come: Callable[[int], bool]) -> None:
        while missing := [str(rank) for rank in ranks if not has_come(rank)]:
            if time.monotonic() > deadline:
                raise failure or late(", ".join(missing))
            time.sleep(0.02)

    def late(ranks: str) -> TimeoutError:
        remark = f". This is an address of {machine} itself; name the first machine by another one"
        return TimeoutError(
            f"{cluster.launcher} started {cluster.num_processes} processes, but rank {ranks} "
            f"did not answer within {options.timeout} s (--timeout) at {place}"
            f"{remark if cluster.num_nodes > 1 and not is_apart else ''}"
        )

    def taken(reason: object) -> UserError:
        return UserError(
            f"{place}: {reason}. Another program or job uses this port, or this is not the address "
            "of rank 0. Give all ranks another MASTER_PORT (torchrun: --master-port)."
        )

    def is_open(rank: int) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=1).close()
            return True
        return False

    def meet() -> T:
        if is_main:
            store.set("first", json.dumps([job, given]))
            store.set("value", sent)
        wait(range(1), lambda rank: store.check(["value"]))
        first_job, first_given = json.loads(store.get("first"))
        if first_job != job or store.add(f"has {cluster.rank}", 1) > 1:
            raise taken("ranks of another job meet here")
        Cluster.store = store  # which has to stay alive while the job runs
        received = store.get("value")
        problems = set[str]()
        if not is_main and received:
            result: T = pickle.loads(received)
            problems = {
                f"{name}: {first_given.get(name)} on rank 0, {mine} on {machine}. Start all ranks "
                "with the same options."
                for name, mine in given.items()
                if mine != first_given.get(name)
            } or {check(result)}
            if is_apart:
                store.set("apart", "")
                problems.add(_hidden(machine))
        store.set(str(cluster.rank), json.dumps([*problems]))
        if is_main:
            ranks = range(cluster.num_processes)
            wait(ranks, lambda rank: store.check([str(rank)]))
            problems = {one for rank in ranks for one in json.loads(store.get(str(rank)))}
            if store.check(["apart"]):
                problems.add(_hidden(machine))
            store.set("problems", json.dumps(sorted(problems - {""})))
        if failure or not received:
            raise failure or UserError([])
        wait(range(1), lambda rank: store.check(["problems"]))
        if problems := json.loads(store.get("problems")):
            time.sleep(is_host)  # until the other ranks have read them, too
            raise UserError(problems)
        return value if is_main else result

    if is_main:
        try:
            if is_host:
                with reserved_port(port):
                    pass
        except OSError as error:
            raise taken(error.strerror) from None
        try:
            value = make()
            sent = pickle.dumps(value)
        except Exception as error:  # the other ranks have to learn that there is no value
            failure = error
    else:
        wait(range(1), is_open)
    from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

    # It does not wait for other ranks: their number is left out.
    patience = timedelta(seconds=PATIENCE)
    try:
        own = timely(PATIENCE, lambda: TCPStore(host, port, is_master=is_host, timeout=patience))
    except (DistError, TimeoutError):
        raise taken("no store of torch answers") from None
    # Torch's process group uses this store. Set before, torch would ignore that the port is taken.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    store: Any = PrefixStore(f"megakit/{attempt}", own)
    deadline = time.monotonic() + options.timeout
    try:
        return timely(options.timeout + 5, meet)
    except TimeoutError as error:
        raise error if error.args else late("0") from None


#: How addresses begin that mean, on each machine, this machine itself.
LOOPBACK = ("127.", "::1")


def _resolve(host: str) -> str:
    """Returns the address of a machine; the name of a new one may be known after some seconds."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return str(socket.getaddrinfo(host, None)[0][4][0])
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"MASTER_ADDR {host}: {socket.gethostname()} finds no machine of this name "
                    f"({error.strerror}). Correct it, or use the numeric address of rank 0."
                ) from None
            time.sleep(0.5)


def _hidden(machine: str) -> str:
    """Returns why other machines cannot reach this one through gloo, or nothing."""
    address = "127.0.0.1"  # gloo's, if the name cannot be resolved
    with contextlib.suppress(socket.gaierror):
        address = str(socket.getaddrinfo(machine, None)[0][4][0])
    if "GLOO_SOCKET_IFNAME" in os.environ or not address.startswith(LOOPBACK):
        return ""
    return (
        f"{machine} resolves its own name to {address}, where other machines cannot reach it. "
        "Give the name another address in /etc/hosts, or set GLOO_SOCKET_IFNAME there to the "
        "network interface to use (`ip -brief address` lists them)."
    )
