"""Starts and ends the processes of a job on one machine, without importing torch."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from megakit.job.cluster import LAUNCHER
from megakit.reporting.console import Console
from megakit.runtime.signals import (
    EXIT_STATUS,
    StopRequest,
    accepted_signals,
    die_with_parent,
    exit_status,
    handle_signals,
)

#: The exit status of a rank that refuses its input.
REFUSED = 2
#: Seconds that the other ranks have to end after one has stopped; half of it if it has failed.
GRACE = 20.0


def launch(devices: int, console: Console) -> int:
    """Runs the current command once per rank, with torchrun's variables, and waits for all ranks.

    Torch's own launcher starts a job later by the time that importing torch takes. Signals are
    forwarded to the ranks; a second signal kills them. If one rank fails, the others are
    terminated. If this process is killed, the kernel kills the ranks: see `read_cluster`.

    Returns:
        The exit status of the job: the status of the first failing rank, or 0.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    request = StopRequest()
    sent: set[int] = set()

    def send(number: int) -> None:
        sent.add(number)
        for rank in ranks:
            rank.send_signal(number)

    def forward(number: int, frame: FrameType | None) -> None:
        is_first = not request.received
        if request.is_repeated(number):
            send(signal.SIGKILL)
        elif is_first:
            send(number)

    handle_signals(forward)
    with socket.socket() as reserved:  # until the end: the kernel gives its port to nobody else
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.getsockname()[1])}
        common |= {"WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": str(devices)}
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **common, LAUNCHER: str(os.getpid())}
        # The options of this interpreter, such as -P and -W error; multiprocessing does the same.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        for rank in range(devices):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
            command = [sys.executable, *flags, *sys.argv]
            ranks.append(subprocess.Popen(command, env=environment | own))
        if request.received:  # before all ranks were there
            send(request.received)
        deadline, status = float("inf"), 0

        def are_running() -> bool:
            return None in [one.poll() for one in ranks]  # polls every rank

        while are_running():
            failed = next((number for number, one in enumerate(ranks) if one.returncode), None)
            if failed is not None and deadline == float("inf"):
                status = _status(ranks[failed], failed, sent, request, console)
                is_stopped = status in EXIT_STATUS.values()
                if status == REFUSED:  # the other ranks may refuse the same, and rank 0 says why
                    patience = time.monotonic() + GRACE / 4
                    while are_running() and time.monotonic() < patience:
                        time.sleep(0.05)
                if not is_stopped:
                    send(signal.SIGTERM)
                deadline = time.monotonic() + (GRACE if is_stopped else GRACE / 2)
            if time.monotonic() > deadline and signal.SIGKILL not in sent:
                for number, one in enumerate(ranks):
                    if one.poll() is None:  # its Python handles no signal during a call of CUDA
                        console.say(f"Rank {number} (process {one.pid}) does not end; killing it.")
                send(signal.SIGKILL)
            time.sleep(0.05)
    for number, ended in enumerate(ranks):  # since the last poll
        if not status and ended.returncode:
            status = _status(ended, number, sent, request, console)
    return status


def _status(
    rank: subprocess.Popen[bytes],
    number: int,
    sent: set[int],
    request: StopRequest,
    console: Console,
) -> int:
    """Returns the exit status of the job for the first rank that failed, and reports the rank.

    A forwarded signal kills a rank that has not installed its handlers yet; then the job counts as
    stopped. Any other killed rank counts as failed.
    """
    code = rank.returncode
    if -code in sent and request.received:
        return exit_status(request.received)
    if code < 0:
        console.say(
            f"Rank {number} (process {rank.pid}) was killed by {signal.Signals(-code).name}; "
            "ending the other ranks."
        )
        return 1
    if code not in (REFUSED, *EXIT_STATUS.values()):  # a rank that refuses has said why
        console.say(
            f"Rank {number} (process {rank.pid}) ended with status {code}; ending the others."
        )
    return code


# --- Forks ----------------------------------------------------------------------------------------


def run_in_fork(work: Callable[[], object]) -> int:
    """Runs a function in a forked process and waits for the process to end.

    The fork has the modules that this process has imported. Signals sent to this process are
    forwarded; the terminal sends Ctrl-C to both processes. If this process is killed, the kernel
    kills the fork.

    Args:
        work: The function. The forked process ends when the function returns or raises.

    Returns:
        The exit status of the forked process, as a shell reports it.
    """
    SI_KERNEL = 0x80  # si_code of signals that a terminal sends to all of its processes
    awaited = (*accepted_signals(), signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    sys.stdout.flush()
    sys.stderr.flush()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _end_fork(work)
    try:
        while True:
            received = signal.sigwaitinfo(awaited)
            if received.si_signo != signal.SIGCHLD:
                # A closed terminal sends SIGHUP only to the first process of its session.
                if received.si_code != SI_KERNEL or received.si_signo == signal.SIGHUP:
                    os.kill(child, received.si_signo)
                continue
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_fork(work: Callable[[], object]) -> NoReturn:
    """Ends a fork as Python would end, but without what the parent does at its own exit."""
    status = 1
    try:
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
