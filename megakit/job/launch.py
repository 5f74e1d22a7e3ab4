"""Starts and ends the processes of a job on one machine, without importing torch."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import NoReturn

from megakit.job.cluster import Cluster
from megakit.reporting.console import Console
from megakit.runtime.loopback import port_of, reserve_port
from megakit.runtime.signals import (
    EXIT_STATUS,
    StopRequest,
    accepted_signals,
    die_with_parent,
    exit_status,
    handle_signals,
    ignore_signals,
)

#: The exit status of a rank that refuses its input.
REFUSED = 2
#: Seconds that the other ranks have to end after a signal stopped the first rank. They have half
#: of this time after a rank failed.
GRACE = 20.0


def launch(
    num_processes: int,
    console: Console,
    environment: Mapping[str, str],
    descriptors: Sequence[int] = (),
) -> int:
    """Runs the current command once per rank and waits for all ranks.

    Signals are forwarded to the ranks; a second signal kills the ranks. If one rank fails, the
    other ranks are terminated. If this process is killed, the kernel kills the ranks.

    Args:
        num_processes: Number of ranks to start.
        console: Reports which rank failed.
        environment: Variables for every rank, in addition to this process's environment.
        descriptors: File descriptors that every rank inherits.

    Returns:
        The exit status of the job: the status of the first failing rank, or 0.
    """
    reserved = reserve_port()
    common = {"OMP_NUM_THREADS": "1", **os.environ, **environment, "MASTER_PORT": port_of(reserved)}
    ranks: list[subprocess.Popen[bytes]] = []
    forwarder = _SignalForwarder(ranks)
    handle_signals(forwarder.receive)
    parent = os.getpid()
    end_watcher = _watch_launcher(parent, console)
    for rank in range(num_processes):
        if forwarder.received:
            break
        cluster = Cluster(rank=rank, local_rank=rank, devices=num_processes, address="127.0.0.1")
        ranks.append(
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env=common | cluster.torchrun_variables(),
                pass_fds=descriptors,
                preexec_fn=lambda: die_with_parent(parent),
            )
        )
    if forwarder.received:
        # For the rank that was being started when the signal came.
        forwarder.send(forwarder.received)
    try:
        return _wait(ranks, forwarder, console)
    finally:
        end_watcher()
        reserved.close()


def end_fork(work: Callable[[], object]) -> NoReturn:
    """Runs a function in a process that was just forked, and ends the process.

    The exit status is the one that Python would have after the function. What the parent registered
    to do at its own exit is not done.
    """
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


def run_in_fork(work: Callable[[], object]) -> int:
    """Runs a function in a forked process and waits for the process to end.

    Signals sent to this process are forwarded; the terminal sends Ctrl-C to both processes. If
    this process is killed, the kernel kills the forked process.

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

        def work_under_parent() -> None:
            die_with_parent(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            work()

        end_fork(work_under_parent)
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


class _SignalForwarder:
    """Forwards signals to the ranks; a second signal kills the ranks."""

    def __init__(self, ranks: list[subprocess.Popen[bytes]]) -> None:
        self.ranks = ranks
        self.request = StopRequest()
        self.sent: set[int] = set()

    @property
    def received(self) -> int:
        """The first signal, or 0."""
        return self.request.received

    def receive(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.received
        if self.request.is_repeated(number):
            self.send(signal.SIGKILL)
        elif is_first:
            self.send(number)

    def send(self, number: int) -> None:
        """Sends a signal to all ranks that are still running."""
        self.sent.add(number)
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def status(self, returncode: int) -> int:
        """Returns the exit status of the job for a rank's return code.

        A rank normally handles a stop signal and exits with the status for this signal. A forwarded
        signal kills a rank that has not installed its handlers yet; the rank counts as stopped.
        Any other killed rank counts as failed.
        """
        if returncode >= 0:
            return returncode
        if self.received and -returncode in self.sent:
            return exit_status(self.received)
        return 1


def _wait(
    ranks: list[subprocess.Popen[bytes]], forwarder: _SignalForwarder, console: Console
) -> int:
    """Waits for all ranks; ends the other ranks after one has failed."""
    status = 0
    deadline: float | None = None
    while None in [rank.poll() for rank in ranks]:  # the list polls every rank: sets returncode
        failed = [(number, rank) for number, rank in enumerate(ranks) if rank.returncode]
        if failed and deadline is None:
            number, rank = failed[0]
            status = forwarder.status(rank.returncode)
            stopped = status in EXIT_STATUS.values()
            if not stopped:
                if status != REFUSED:  # rank 0 has reported why it refuses
                    console.say(f"Rank {number} {_describe_end(rank)}; ending the other ranks.")
                forwarder.send(signal.SIGTERM)
            deadline = time.monotonic() + (GRACE if stopped else GRACE / 2)
        if deadline is not None and time.monotonic() > deadline:
            forwarder.send(signal.SIGKILL)
        time.sleep(0.05)
    if not status:  # the last rank, or all ranks, ended since the last poll
        for number, rank in enumerate(ranks):
            status = status or forwarder.status(rank.returncode)
            if status == 1 and rank.returncode < 0:
                console.say(f"Rank {number} {_describe_end(rank)}.")
                break
    return status if ranks else exit_status(forwarder.received)


def _describe_end(rank: subprocess.Popen[bytes]) -> str:
    if rank.returncode < 0:
        name = signal.Signals(-rank.returncode).name
        return f"(process {rank.pid}) was killed by {name}"
    return f"(process {rank.pid}) ended with status {rank.returncode}"


def _watch_launcher(parent: int, console: Console) -> Callable[[], None]:
    """Forks a watcher process that reports when this process is killed.

    The kernel kills the ranks of a killed launcher silently.

    Returns:
        A function that ends the watcher.
    """
    reading, writing = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.close(writing)
        ignore_signals()
        if not os.read(reading, 1):  # closed without the byte that `release` writes
            console.say(
                f"The launching process ({parent}) was killed, and its ranks with it. "
                "The same command resumes from the last complete checkpoint."
            )
        os._exit(0)
    os.close(reading)

    def release() -> None:
        os.write(writing, b"-")
        os.close(writing)
        os.waitpid(watcher, 0)

    return release


def end_with_torchrun(console: Console) -> None:
    """Ends this rank when torchrun's agent is gone, since a killed agent leaves its ranks running.

    Args:
        console: Reports that the agent is gone.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(1)
        rank = os.environ.get("RANK", "?")
        console.error(f"Rank {rank} ends, as torchrun's agent (process {agent}) has ended.")
        os._exit(1)

    threading.Thread(target=watch, name="torchrun's agent", daemon=True).start()
