"""Sends what rank 0 decides to all ranks of a job."""

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from datetime import timedelta
from typing import Any, TypeVar

from megakit.errors import UserError
from megakit.job.cluster import PATIENCE, Cluster, timely, until
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
    attempt = os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    machine = socket.gethostname()
    until(PATIENCE, lambda: _address_of(host))  # for the name of a machine that has just begun
    try:
        address = str(socket.getaddrinfo(host, port)[0][4][0])
    except socket.gaierror as error:
        raise UserError(
            f"MASTER_ADDR {host}: {machine} finds no machine of this name ({error.strerror}). "
            "Correct it, or use the numeric address of rank 0."
        ) from None
    place = f"MASTER_ADDR {host} ({address}), MASTER_PORT {port}"
    is_main = cluster.rank == 0
    # The process that hosts the store; with torchrun, its agent does.
    is_host = is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    is_apart = cluster.num_nodes > 1 and not address.startswith(LOOPBACK)
    of_slurm = ("SLURM_JOB_ID", "SLURM_STEP_ID") if cluster.launcher == "srun" else ()
    job = [cluster.num_processes, *(os.environ[name] for name in of_slurm)]
    given = {flag(one.name): str(getattr(options, one.name)) for one in fields(options)}
    # A relative --output-dir depends on where a rank was started; `check` compares the folders.
    del given["--output-dir"]
    ranks = range(cluster.num_processes)
    sent = b""
    failure: Exception | None = None

    def taken(reason: object) -> UserError:
        return UserError(
            f"{place}: {reason}. Another program or job uses this port, or this is not the address "
            "of rank 0. Give all ranks another MASTER_PORT (torchrun: --master-port)."
        )

    def late(absent: Iterable[int]) -> TimeoutError:
        return TimeoutError(
            f"{cluster.launcher} started {cluster.num_processes} processes, but rank "
            f"{', '.join(map(str, absent))} did not answer within {options.timeout} s (--timeout) "
            f"at {place}"
        )

    def is_open() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=1).close()
            return True
        return False

    def meet() -> T:
        # 1. Rank 0 says which job this is, with which options, and what it has made.
        if is_main:
            store.set("first", pickle.dumps((job, given, sent)))
        first_job, first_given, received = pickle.loads(store.get("first"))
        if first_job != job or store.add(f"has {cluster.rank}", 1) > 1:
            raise taken("ranks of another job meet here")
        Cluster.store = store  # which has to stay alive while the job runs
        # 2. Every rank says why it cannot take part.
        problems = [
            f"{name}: {first_given.get(name)} on rank 0, {mine} on {machine}. Start all ranks with "
            "the same options."
            for name, mine in given.items()
            if mine != first_given.get(name)
        ]
        if received and not problems:
            result: T = pickle.loads(received)
            problems.append(check(result))
        store.set(str(cluster.rank), pickle.dumps((problems, is_apart, _hidden(machine))))
        # 3. Rank 0 says whether they can.
        if is_main:
            store.wait([*map(str, ranks)])
            answers = [pickle.loads(store.get(str(rank))) for rank in ranks]
            told = {problem for problems, *_ in answers for problem in problems}
            if any(is_apart for _, is_apart, _ in answers):
                told |= {hidden for *_, hidden in answers}
            store.set("problems", pickle.dumps(sorted(told - {""})))
        if failure or not received:
            raise failure or UserError([])
        if problems := pickle.loads(store.get("problems")):
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
    elif not until(options.timeout, is_open):
        raise late([0])
    from torch.distributed import (  # type: ignore[attr-defined]
        DistError,
        DistStoreError,
        PrefixStore,
        TCPStore,
    )

    # It does not wait for other ranks: their number is left out.
    patience = timedelta(seconds=PATIENCE)
    try:
        own = timely(PATIENCE, lambda: TCPStore(host, port, is_master=is_host, timeout=patience))
    except (DistError, TimeoutError):
        raise taken("no store of torch answers") from None
    # Torch's process group uses this store. Set before, torch would ignore that the port is taken.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    store: Any = PrefixStore(f"megakit/{attempt}", own)
    store.set_timeout(timedelta(seconds=options.timeout))  # of `get` and `wait`
    try:
        return timely(options.timeout + 5, meet)
    except (DistStoreError, TimeoutError):
        absent = [rank for rank in ranks if is_main and not store.check([str(rank)])]
        raise failure or late(absent or [0]) from None


#: How addresses begin that mean, on each machine, this machine itself.
LOOPBACK = ("127.", "::1")


def _address_of(name: str) -> str:
    with contextlib.suppress(socket.gaierror):
        return str(socket.getaddrinfo(name, None)[0][4][0])
    return ""


def _hidden(machine: str) -> str:
    """Returns why other machines cannot reach this one through gloo, or nothing."""
    address = _address_of(machine) or "127.0.0.1"  # gloo's, if the name cannot be resolved
    if "GLOO_SOCKET_IFNAME" in os.environ or not address.startswith(LOOPBACK):
        return ""
    return (
        f"{machine} resolves its own name to {address}, where other machines cannot reach it. "
        "Give the name another address in /etc/hosts, or set GLOO_SOCKET_IFNAME there to the "
        "network interface to use (`ip -brief address` lists them)."
    )
