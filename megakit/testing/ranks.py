"""Runs functions on several ranks, in processes: a pool for tests."""

import contextlib
import faulthandler
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from megakit.runtime.accelerator import use_accelerator
from megakit.runtime.deferred_imports import resume_collector, suspend_collector
from megakit.testing.parallel_state import note_time
from megakit.testing.workers import search_path

T = TypeVar("T")

#: Seconds to wait for the other ranks after a rank has failed.
GRACE = 5.0
_ONE_MACHINE = {"MASTER_ADDR": "127.0.0.1", "GROUP_RANK": "0"}
_SERVE = "import sys; from megakit.testing.ranks import serve; serve(*sys.argv[1:])"


class RankError(AssertionError):
    """A rank failed, died or did not return; the message has its traceback, or the log's end."""


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """Runs functions as the ranks of jobs, one job after another, in processes.

    On a CPU, a process imports the frameworks once, and forks the ranks of each job. In pytest, use
    a fixture with session scope::

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
        self.number, self.accelerator, self.timeout = number, accelerator, timeout
        self._process: subprocess.Popen[bytes] | None = None

    def __exit__(self, *exception: object) -> None:
        self.close()

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
        payload = _by_value(function, arguments)
        self._start()
        self._said_before = Path(self._log.name).stat().st_size
        pipes = [Pipe() for _ in range(size)]
        with socket.socket() as reserved:  # until the end: the kernel gives its port to nobody else
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("", 0))
            port = str(reserved.getsockname()[1])
            connections = [connection for connection, _ in pipes]
            try:
                socket.send_fds(self._server, [b"job"], [end.fileno() for _, end in pipes])
                for rank, (connection, end) in enumerate(pipes):
                    end.close()
                    environment = {**_ONE_MACHINE, "MASTER_PORT": port}
                    environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
                    environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
                    connection.send((sys.path, environment, payload, self.timeout))
                for connection in connections:
                    connection.recv()  # it has begun
            except (EOFError, OSError):
                message = f"the ranks did not start:\n{self._said()}"
                self.close()
                raise RankError(message) from None
            return self._collect(connections)

    def close(self) -> None:
        """Ends all processes of the pool; a further job starts new processes."""
        if self._process is not None:
            self._server.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            self._log.close()

    def _start(self) -> None:
        if self._process is not None:
            return
        self._log = tempfile.NamedTemporaryFile(prefix="ranks-")  # noqa: SIM115  # `close` does it
        self._server, end = socket.socketpair()
        threads = str(max(1, len(os.sched_getaffinity(0)) // self.number))
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, self.accelerator, str(end.fileno())],
                env={"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": search_path()},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[end.fileno()],
                start_new_session=True,
            )

    def _collect(self, connections: list[Connection]) -> list[Any]:
        """Waits for the results of the ranks; ends the pool if a result is missing."""
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        pending: dict[Any, int] = {connection: rank for rank, connection in enumerate(connections)}
        deadline = time.monotonic() + self.timeout + GRACE  # a rank ends itself after `timeout`
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                rank = pending.pop(connection)
                try:
                    failed_at, answer = pickle.loads(connections[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    failed_at, answer = 0.0, f"it died:\n{self._log_of_death(rank)}"
                if failed_at is None:
                    results[rank] = answer
                else:
                    failures.append((failed_at, rank, answer))
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        said = self._said()
        if pending:
            self.close()
        if failures:
            _, rank, answer = min(failures)  # later failures may be consequences
            raise RankError(f"rank {rank} of {len(connections)} failed: {answer}")
        if pending:  # stopped, or a child of theirs holds the connection
            raise RankError(f"ranks {sorted(pending.values())} gave no result:\n{said}")
        return [results[rank] for rank in range(len(connections))]

    def _log_of_death(self, rank: int) -> str:
        """Returns the log, where `serve` says how the rank ended, within 5 seconds."""
        deadline = time.monotonic() + 5
        while f"\nrank {rank} " not in f"\n{self._said()}" and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._said()

    def _said(self) -> str:
        """Returns what this job's ranks have logged: the first stack of a hung rank, or the end."""
        log = Path(self._log.name).read_bytes()[self._said_before :].decode(errors="replace")
        _, hung, stack = log.partition("Timeout (")
        if hung:  # the most recent call comes first
            lines = [f"no result after {self.timeout:g} s", *stack.splitlines()[1:30]]
            return "\n".join(lines + re.findall(r"^rank .*$", log, re.MULTILINE))
        return "\n".join(log.splitlines()[-30:])


def serve(accelerator: Literal["cpu", "gpu"], descriptor: str) -> None:
    """Runs in the pool's first process: imports the frameworks, and forks the ranks of each job."""
    if accelerator == "cpu":
        # Not for GPUs: a forked process cannot use CUDA if its parent has used CUDA.
        suspend_collector()
        use_accelerator("cpu")
        import megakit.training.fit  # noqa: F401  # NeMo, which most jobs need

        resume_collector()
    signal.signal(signal.SIGCHLD, _note_death)
    requests = socket.socket(fileno=int(descriptor))
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 8, 1024)
        if not request:
            return
        for rank, end in enumerate(descriptors):
            process = os.fork()
            if not process:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in descriptors[rank + 1 :]:
                    os.close(other)
                requests.close()
                _run_rank(Connection(end))
            _RANKS[process] = rank
            os.close(end)


#: The number of each rank by its process.
_RANKS: dict[int, int] = {}


def _note_death(*_: object) -> None:
    """Writes to the log how ranks ended that did not end well."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            rank, code = _RANKS.get(found[0], "?"), os.waitstatus_to_exitcode(found[1])
            if code:
                how = signal.Signals(-code).name if code < 0 else f"status {code}"
                print(f"rank {rank} ended by {how}", file=sys.stderr, flush=True)


def _run_rank(connection: Connection) -> NoReturn:
    """Runs a job's function on one rank, and ends."""
    connection.send("begun")
    sys.path[:], environment, payload, timeout = connection.recv()
    faulthandler.dump_traceback_later(timeout, exit=True)
    os.environ.update(environment)
    try:
        function, arguments = pickle.loads(payload)
        answer = cloudpickle.dumps((None, function(*arguments)))
    except BaseException as error:
        answer = cloudpickle.dumps((note_time(error), traceback.format_exc()))
    connection.send_bytes(answer)
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
