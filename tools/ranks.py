"""Starts the ranks of a job in processes of this machine, and says which one hangs or failed."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megakit.errors import UserError
from megakit.runtime.signals import exit_status, handle_signals

from .programs import QUIET, told_by
from .recorder import prepare
from .trace_table import words_of

#: Seconds without a communication of any rank, after which they count as hanging.
PATIENCE = 60


class FailedError(Exception):
    """A rank ended with this error, or the ranks wait for each other."""


@contextlib.contextmanager
def telling(command: str) -> Iterator[None]:
    """Ends the process if the block fails: with status 2 for the user's errors, 1 for the ranks'.

    A signal ends the ranks, too.
    """
    handle_signals(lambda number, _: sys.exit(exit_status(number)))
    try:
        yield
    except (UserError, FailedError) as error:
        for problem in getattr(error, "problems", [str(error)]):
            print(f"{command}: {problem}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


def redirect(stream: int, path: Path) -> int:
    """Lets standard output, 1, or standard error, 2, go to a file; returns what it was before."""
    before = os.dup(stream)
    with path.open("w") as file:
        os.dup2(file.fileno(), stream)
    return before


def prepare_once(program: Path, log: Path) -> None:
    """Imports the frameworks in this process, whose forks then have them."""
    if not torch.cuda.device_count():  # a process that has used CUDA cannot be forked
        before = redirect(2, log)
        try:
            prepare(program)
        finally:
            os.dup2(before, 2)


def run_ranks(
    program: Path, ranks: int, folder: Path, logs: Path, work: Callable[[int], object]
) -> None:
    """Runs a function on all ranks; what rank 3 prints goes to 3.txt and 3.log.

    Args:
        program: The user's program, as messages name it.
        ranks: Number of processes.
        folder: Each rank may write its last event there, into 3.last.
        logs: Folder for standard error.
        work: Called with the rank.

    Raises:
        UserError: The program refuses its options.
        FailedError: It fails, or hangs.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MEGAKIT_COMMAND": program.name}
    job |= QUIET | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}

    def run_rank(rank: int) -> None:
        redirect(1, folder / f"{rank}.txt")
        redirect(2, logs / f"{rank}.log")
        os.environ |= job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        torch.set_num_threads(1)
        work(rank)

    fork = multiprocessing.get_context("fork")  # the frameworks are imported once
    processes = [fork.Process(target=run_rank, args=(rank,)) for rank in range(ranks)]
    try:
        for one in processes:
            one.start()
        while None in (states := [one.exitcode for one in processes]) and not any(states):
            time.sleep(0.05)
            last = [file.stat().st_mtime for file in folder.glob("*.last")]
            if last and time.time() - max(last) > PATIENCE:
                for one in processes:
                    os.kill(one.pid or 0, signal.SIGUSR1)  # which writes its traceback
                time.sleep(1)
                raise FailedError("\n".join(waits(program, ranks, folder, logs)))
        ends = {rank: logs / f"{rank}.log" for rank, state in enumerate(states) if state}
        # The others fail because the first one has ended.
        failed = min(ends, key=lambda rank: ends[rank].stat().st_mtime, default=None)
    finally:
        for one in processes:
            one.kill()
            one.join()
    if failed is not None:
        log_file = logs / f"{failed}.log"
        said = told_by(log_file.read_text(), program.name, log_file)
        if re.search(r"Error\b.*world.?size", said, re.IGNORECASE):
            raise UserError(f"{said} --devices N starts N processes, not {ranks}.".splitlines())
        raise FailedError(f"rank {failed}: {said}")


def waits(program: Path, ranks: int, folder: Path, logs: Path) -> Iterator[str]:
    """Yields for each rank of a job that hangs what it did last, and in which line it is."""
    yield f"the ranks hang: for {PATIENCE} s, none of them has communicated. The last of each:"
    for rank in range(ranks):
        file = folder / f"{rank}.last"
        event = json.loads(file.read_text()) if file.exists() else {"phase": "nothing"}
        words = f": {words_of(event)}" if "bytes" in event else ""
        log = (logs / f"{rank}.log").read_text().rpartition("most recent call first")[2]
        line = re.search(rf'File ".*({re.escape(program.name)})", (line \d+)', log)
        yield f"  rank {rank}, {event['phase']}{words}{f' ({line[1]}, {line[2]})' if line else ''}"
    yield f"The tracebacks are in {logs / '*.log'}."
