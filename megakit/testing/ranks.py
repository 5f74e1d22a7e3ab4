"""Runs functions on several ranks, in processes, for tests."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest import mock

import cloudpickle  # type: ignore[import-untyped]

from megakit.job.launch import environment_of, reserved_port
from megakit.testing.parallel_state import note_time

T = TypeVar("T")

#: Seconds to wait for the other ranks after a rank has failed.
GRACE = 5.0


class RankError(AssertionError):
    """A rank failed, died or did not return; the message has its traceback, or the log's end."""


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """Runs functions as the ranks of jobs, one job after another, in processes.

    On a CPU, a process imports the frameworks once, forks the ranks of each job, and ends together
    with this process. In pytest, use a fixture with session scope::

        @pytest.fixture(scope="session")
        def ranks():
            with Ranks(4) as ranks:
                yield ranks

        def test_sum(ranks):
            assert ranks.run(sum_of_ranks, world_size=2) == [1, 1]

    Args:
        number: The largest number of ranks of a job.
        accelerator: `cpu`, or `gpu` with one GPU per rank; then each rank imports the frameworks.
        timeout: Time limit of a job in seconds.
    """

    def __init__(
        self, number: int, accelerator: Literal["cpu", "gpu"] = "cpu", timeout: float = 120.0
    ) -> None:
        self.number, self.timeout = number, timeout
        # A forked process cannot use CUDA if its parent has used CUDA.
        self._context: Any = multiprocessing.get_context(
            "forkserver" if accelerator == "cpu" else "spawn"
        )

    def __exit__(self, *exception: object) -> None:
        """Does nothing: the ranks of a job end with it."""

    def run(
        self, function: Callable[..., T], *arguments: Any, world_size: int | None = None
    ) -> list[T]:
        """Calls `function(*arguments)` in every rank of a job; returns the results by rank.

        RANK, WORLD_SIZE and the like are set.

        Args:
            function: Any function; cloudpickle must be able to pickle it and its result.
            *arguments: Arguments of the function, the same in all ranks.
            world_size: Number of ranks of the job; by default as many as the pool has.

        Raises:
            RankError: A rank failed, died or did not return in time.
            ValueError: The pool has fewer ranks than `world_size`.
        """
        size = self.number if world_size is None else world_size
        if not 1 <= size <= self.number:
            raise ValueError(f"world_size={size}: this pool has {self.number} processes.")
        job = _by_value(function, arguments)
        processes, answers = [], []
        with reserved_port() as port, tempfile.NamedTemporaryFile(prefix="ranks-") as log:
            try:
                for rank in range(size):
                    receiver, sender = multiprocessing.Pipe(duplex=False)
                    answers.append(receiver)
                    environment = environment_of(rank, size, port)
                    process = self._context.Process(
                        target=_run_rank, args=(sender, log.name, environment, job, self.timeout)
                    )
                    processes.append(process)
                    self._start(process)
                    sender.close()
                return self._collect(processes, answers, Path(log.name))
            finally:
                for process in processes:
                    process.kill()
                    process.join()

    def _start(self, process: Any) -> None:
        """Starts a rank; the first one starts the process that imports the frameworks."""
        multiprocessing.set_forkserver_preload(["megakit.testing.forked_from"])
        threads = str(max(1, len(os.sched_getaffinity(0)) // self.number))
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *sys.path])
        environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": path}
        with mock.patch.dict(os.environ, environment):
            process.start()

    def _collect(self, processes: list[Any], answers: list[Connection], log: Path) -> list[Any]:
        """Waits for the results of all ranks, or for the error of the first rank that failed."""
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        pending: dict[Any, int] = {answer: rank for rank, answer in enumerate(answers)}
        deadline = time.monotonic() + self.timeout + GRACE  # a rank ends itself after `timeout`
        while pending and (left := deadline - time.monotonic()) > 0:
            for answer in wait(list(pending), left):
                rank = pending.pop(answer)
                try:
                    failed_at, result = pickle.loads(answers[rank].recv_bytes())
                except EOFError:
                    processes[rank].join()
                    said = "\n".join(log.read_text(errors="replace").splitlines()[-100:])
                    failed_at = 0.0
                    result = f"it died with status {processes[rank].exitcode}:\n{said}"
                if failed_at is None:
                    results[rank] = result
                else:
                    failures.append((failed_at, rank, result))
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            _, rank, result = min(failures)  # later failures may be consequences
            raise RankError(f"rank {rank} of {len(processes)} failed: {result}")
        if pending:  # stopped, or a child of theirs holds the connection
            raise RankError(f"ranks {sorted(pending.values())} gave no result.")
        return [results[rank] for rank in range(len(processes))]


def _run_rank(
    answers: Connection, log: str, environment: dict[str, str], job: bytes, timeout: float
) -> None:
    """Runs a job's function on one rank, and ends; whatever it prints goes to the log."""
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()  # a crash in C++ says which call of Python it was
    faulthandler.dump_traceback_later(timeout, exit=True)
    os.environ.update(environment)
    try:
        function, arguments = pickle.loads(job)
        answer = cloudpickle.dumps((None, function(*arguments)))
    except BaseException as error:
        answer = cloudpickle.dumps((note_time(error), traceback.format_exc()))
    answers.send_bytes(answer)
    os._exit(0)


def _by_value(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Pickles a function together with its module, because a rank may be unable to import it."""
    module = sys.modules.get(function.__module__)
    is_ours = function.__module__.partition(".")[0] in ("megakit", "__main__")
    with contextlib.ExitStack() as stack:
        if module is not None and not is_ours:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        return bytes(cloudpickle.dumps((function, arguments)))
