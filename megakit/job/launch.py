"""Starting and ending the processes of a job on one machine. No torch here."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType

from megakit.reporting.console import Console
from megakit.runtime.loopback import free_port
from megakit.runtime.signals import (
    EXIT_STATUS,
    StopRequest,
    exit_status,
    handle_signals,
    heard_signals,
    ignore_signals,
)

#: Seconds that ranks get to end by themselves once one of them has failed or a signal came.
GRACE = 20.0


def launch(num_processes: int, console: Console, environment: Mapping[str, str]) -> int:
    """Runs this very command once for each rank, and waits for all of them.

    Signals are handed on to the ranks; a second one ends them at once. If one rank fails, the
    others are ended; if this process is killed, the kernel ends them.

    Args:
        num_processes: Ranks to start.
        console: Says which rank failed.
        environment: What every rank gets besides this process's own environment.

    Returns:
        The exit status of the job: the first failing rank's, or 0.
    """
    common = {
        **os.environ,
        **environment,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "GROUP_RANK": "0",
    }
    common.setdefault("OMP_NUM_THREADS", "1")
    ranks: list[subprocess.Popen[bytes]] = []
    stop = _Stop(ranks)
    handle_signals(stop.receive)
    parent = os.getpid()
    release_watch = _watch(parent, console)
    for rank in range(num_processes):
        if stop.received:
            break
        ranks.append(
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                preexec_fn=lambda: _die_with(parent),
            )
        )
    if stop.received:
        stop.send(stop.received)  # the rank whose start the signal interrupted has not received it
    try:
        return _wait(ranks, stop, console)
    finally:
        release_watch()


def run_in_fork(work: Callable[[], object]) -> int:
    """Runs something in a fork of this process, and waits for it.

    Signals sent to this process are handed on; Ctrl-C reaches both by itself. If this process is
    killed, the kernel ends the other.

    Args:
        work: What to run; the other process ends with it, or with the SystemExit that it raises.

    Returns:
        Its exit status, as a shell would give it.
    """
    SI_KERNEL = 0x80  # the code of a signal that the terminal sent, to all of its processes
    awaited = (*heard_signals(), signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    sys.stdout.flush()
    sys.stderr.flush()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        status = 1
        try:
            _die_with(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
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
    try:
        while True:
            received = signal.sigwaitinfo(awaited)
            if received.si_signo != signal.SIGCHLD:
                # A lost terminal signals the first process of its session alone.
                if received.si_code != SI_KERNEL or received.si_signo == signal.SIGHUP:
                    os.kill(child, received.si_signo)
                continue
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Stop:
    """Hands signals on to the ranks; a second one ends them at once.

    Args:
        ranks: The processes, as far as they have been started.

    Attributes:
        received: The first signal, or 0.
        sent: Signals that were sent to all ranks.
    """

    def __init__(self, ranks: list[subprocess.Popen[bytes]]) -> None:
        self.ranks = ranks
        self.request = StopRequest()
        self.sent: set[int] = set()

    @property
    def received(self) -> int:
        return self.request.received

    def receive(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.received
        if self.request.is_repeated(number):
            self.send(signal.SIGKILL)
        elif is_first:
            self.send(number)

    def send(self, number: int) -> None:
        """Sends a signal to all ranks that still run."""
        self.sent.add(number)
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def status(self, returncode: int) -> int:
        """The exit status that a rank's end means for the job.

        A killed rank is a failure of the job; a stopped one has said so itself, unless the signal
        came before it listened.
        """
        if returncode >= 0:
            return returncode
        if self.received and -returncode in self.sent:
            return exit_status(self.received)
        return 1


def _wait(ranks: list[subprocess.Popen[bytes]], stop: _Stop, console: Console) -> int:
    """Waits for all ranks; ends the rest once one has failed."""
    status = 0
    deadline: float | None = None
    while None in [rank.poll() for rank in ranks]:  # asks each of them, and so learns its status
        failed = [(number, rank) for number, rank in enumerate(ranks) if rank.returncode]
        if failed and deadline is None:
            number, rank = failed[0]
            status = stop.status(rank.returncode)
            stopped = status in EXIT_STATUS.values()
            if not stopped:
                console.say(f"Rank {number} {_ended(rank)}; ending the others.")
                stop.send(signal.SIGTERM)
            deadline = time.monotonic() + (GRACE if stopped else GRACE / 2)
        if deadline is not None and time.monotonic() > deadline:
            stop.send(signal.SIGKILL)
        time.sleep(0.05)
    if not status:  # the last to end, or all of them between two looks
        for number, rank in enumerate(ranks):
            status = status or stop.status(rank.returncode)
            if status == 1 and rank.returncode < 0:
                console.say(f"Rank {number} {_ended(rank)}.")
                break
    return status if ranks else exit_status(stop.received)


def _ended(rank: subprocess.Popen[bytes]) -> str:
    if rank.returncode < 0:
        name = signal.Signals(-rank.returncode).name
        return f"(process {rank.pid}) was killed by {name}"
    return f"(process {rank.pid}) ended with status {rank.returncode}"


def _watch(parent: int, console: Console) -> Callable[[], None]:
    """Has a small process say so if this one is killed: the kernel ends the ranks without a word.

    Returns:
        A function that ends that process.
    """
    reading, writing = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.close(writing)
        ignore_signals()
        if not os.read(reading, 1):  # closed without a word
            console.say(
                f"The launching process ({parent}) was killed, and its ranks with it. "
                "The same command goes on from the last complete checkpoint."
            )
        os._exit(0)
    os.close(reading)

    def release() -> None:
        os.write(writing, b"-")
        os.close(writing)
        os.waitpid(watcher, 0)

    return release


def end_with_torchrun(console: Console) -> None:
    """Ends this rank when torchrun's agent is gone. An agent that is killed leaves its ranks alive.

    Args:
        console: Says so.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(1)
        rank = os.environ.get("RANK", "?")
        console.error(f"Rank {rank}: torchrun's agent (process {agent}) is gone; ending.")
        os._exit(1)

    threading.Thread(target=watch, name="torchrun's agent", daemon=True).start()


def _die_with(parent: int) -> None:
    """Between fork and exec of a rank: has the kernel kill it when its parent dies."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(1)
