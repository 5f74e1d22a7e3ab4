"""Starts and ends the processes of a job on one machine, without importing torch."""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from megakit.job.cluster import LAUNCHER, until
from megakit.job.console import Console
from megakit.runtime.signals import (
    EXIT_STATUS,
    StopRequest,
    die_with_parent,
    exit_status,
    handle_signals,
    handlers_restored,
    reset_signals,
    stop_signals_blocked,
)

#: Seconds that the other ranks have to end after one has stopped.
GRACE = 20.0


def launch(devices: int, console: Console) -> int:
    """Runs the current command once per rank, with torchrun's variables, and waits for all ranks.

    Torch's own launcher starts a job later by the time that importing torch takes. Signals are
    forwarded to the ranks; a second signal kills them. If one rank fails, the others are killed,
    because they can save nothing without it. If this process ends, the kernel kills the ranks: see
    `read_cluster`.

    Returns:
        The exit status of the job: the status of the first failing rank, or 0.
    """
    request, sent = StopRequest(), set[int]()
    shared = {"OMP_NUM_THREADS": "1", **os.environ, LAUNCHER: str(os.getpid())}

    def send(number: int) -> None:
        sent.add(number)
        for rank in ranks:
            rank.send_signal(number)

    def forward(number: int, frame: FrameType | None) -> None:
        send(signal.SIGKILL if request.is_repeated(number) else number)

    def have_ended() -> bool:
        return None not in [rank.poll() for rank in ranks]

    with reserved_port() as port:
        ranks = [
            subprocess.Popen(
                [sys.executable, *sys.argv], env=shared | environment_of(rank, devices, port)
            )
            for rank in range(devices)
        ]
        handle_signals(forward)
        while not any(codes := [rank.poll() for rank in ranks]) and None in codes:
            time.sleep(0.05)
        if not any(codes):
            return 0
        status = next(filter(None, codes))
        if -status in sent and request.received:  # the rank had not installed its handlers yet
            status = exit_status(request.received)
        elif status < 0:
            number = codes.index(status)
            console.say(
                f"Rank {number} (process {ranks[number].pid}) was killed by "
                f"{signal.Signals(-status).name}; ending the other ranks."
            )
            status = 1
        if status in EXIT_STATUS.values():  # the ranks save a checkpoint together
            until(GRACE, have_ended)  # Python handles no signal during a call of CUDA
        send(signal.SIGKILL)
        until(GRACE, have_ended)
    return status


@contextlib.contextmanager
def reserved_port(port: int = 0) -> Iterator[int]:
    """Yields a port of this machine that the kernel gives to nobody else until the end.

    Raises:
        OSError: Another process listens on the port that was asked for.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", port))
        yield reserved.getsockname()[1]


def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    """Returns torchrun's variables for a rank of a job on this machine."""
    values = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GROUP_RANK": 0,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
    }
    return {name: str(value) for name, value in values.items()}


def run_in_fork(work: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> int:
    """Runs a function in a forked process and waits for the process to end.

    The fork has the modules that this process has imported. Signals sent to this process are
    forwarded. If this process is killed, the kernel kills the fork.

    Args:
        work: The function. The forked process ends when the function returns or raises.
        meanwhile: What this process does before it waits; by default nothing.

    Returns:
        The exit status of the forked process, as a shell reports it.
    """
    parent = os.getpid()

    def start() -> None:
        die_with_parent(parent)
        reset_signals()
        work()

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # the fork has just ended
            os.kill(child, number)

    process = multiprocessing.get_context("fork").Process(target=start)
    with handlers_restored():
        with stop_signals_blocked():
            process.start()
            child = process.pid or 0
            handle_signals(forward)
        meanwhile()
        process.join()
    code = process.exitcode or 0
    return code if code >= 0 else 128 - code
