"""Sets up Megatron's parallel state for tests, and runs tests on several ranks in processes."""

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar
from unittest import mock

import cloudpickle  # type: ignore[import-untyped]

from megakit.runtime.accelerator import (
    AcceleratorName,
    destroy_parallel_state,
    find_accelerator,
    own_gpu,
    use_accelerator,
    use_full_float32,
)
from megakit.runtime.memory import resume_collector, suspend_collector
from megakit.runtime.patching import require_attribute
from megakit.testing.processes import search_path

T = TypeVar("T")

#: Seconds to wait for the other ranks after a rank has failed.
GRACE = 5.0
#: Threads of gloo in a rank, above which it collects what earlier jobs left.
MANY_THREADS = 40
#: Threads of gloo in a rank before a job, above which new processes replace the pool's.
TOO_MANY_THREADS = 100

_SERVE = "import sys; from megakit.testing.parallel import serve; serve(*sys.argv[1:])"


@contextlib.contextmanager
def distributed_model_parallel_state(
    seed: int = 42,
    rank: int | None = None,
    world_size: int | None = None,
    backend: Literal["gloo", "nccl", "fake"] | None = None,
    *,
    accelerator: AcceleratorName = "auto",
    timeout: float = 60.0,
    **sizes: Any,
) -> Iterator[None]:
    """Sets up torch.distributed and Megatron's parallel state, and destroys both at the end.

    A single process is a job of one rank. A process that `Ranks`, torchrun or `--devices` started
    joins the other ranks of its job. With `rank` and `world_size`, the process joins a job that no
    launcher has started: every rank calls this function, and they meet at MASTER_ADDR and
    MASTER_PORT, by default at port 29500 of this machine. torch's random state and the environment
    are restored at the end.

    On a CPU, the patches of `megakit.runtime` are applied for the rest of the process. So no code
    of the process may import Megatron before the first use of this function. On a GPU, TF32 is
    switched off for the rest of the process, because tests compare layouts in float32.

    Args:
        seed: Seed of Megatron's random-number tracker, from which dropout draws.
        rank: Number of this rank, from 0; by default the environment's RANK, or 0.
        world_size: Number of ranks; by default the environment's WORLD_SIZE, or 1.
        backend: By default NCCL on GPUs and gloo on CPUs. With gloo, several ranks can share a GPU.
            `fake` needs no other ranks: see `fake_ranks`.
        accelerator: `auto` uses a GPU if it works, else the CPU.
        timeout: Seconds that a collective waits for the other ranks.
        **sizes: Arguments of Megatron's `initialize_model_parallel`, such as
            `tensor_model_parallel_size=2`; the remaining ranks are data parallel.

    Raises:
        RuntimeError: torch.distributed is set up already, or the sizes do not fit the number of
            ranks.
        ValueError: The rank is not in the job.
    """
    name = _accelerator(accelerator)
    use_accelerator(name)
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if dist.is_initialized():
        raise RuntimeError("torch.distributed is set up already. A process runs one job at a time.")
    given, environment, excepthook = (rank, world_size), dict(os.environ), sys.excepthook
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank={rank}: a job of {world_size} ranks has the ranks 0 to {world_size - 1}."
        )
    random_state = torch.get_rng_state()
    try:
        if given != (None, None):
            _set_environment(rank, world_size)
        if name == "gpu":
            torch.cuda.set_device(own_gpu())
            use_full_float32()
        dist.init_process_group(
            backend or ("gloo" if name == "cpu" else "nccl"),
            store=_store(backend, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        if backend == "fake":
            sizes = {"create_gloo_process_groups": False, **sizes}
        with _only_groups_of(rank) if backend == "fake" else contextlib.nullcontext():
            parallel_state.initialize_model_parallel(**sizes)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        yield
    except BaseException as error:
        _note_time(error)
        raise
    finally:
        destroy_parallel_state()
        torch.set_rng_state(random_state)
        sys.excepthook = excepthook  # torch's adds the rank, once for each job
        os.environ.clear()
        os.environ.update(environment)


def _set_environment(rank: int, world_size: int) -> None:
    """Sets the variables from which the frameworks and `own_gpu` read the job."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    for variable, value in (
        *(("LOCAL_RANK", str(rank)), ("LOCAL_WORLD_SIZE", str(world_size))),
        *(("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")),
    ):
        os.environ.setdefault(variable, value)


@contextlib.contextmanager
def _only_groups_of(rank: int) -> Iterator[None]:
    """Makes Megatron create only the groups of one rank.

    Megatron creates the groups of all ranks, since torch's real backends require this of each rank.
    The others take more than half of the time of a fake job.
    """
    from megatron.core import parallel_state

    original = require_attribute(parallel_state, "create_group")

    def create_group(ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        return original(ranks, *args, **kwargs) if rank in ranks else None

    with mock.patch.object(parallel_state, "create_group", create_group):
        yield


def _store(backend: str | None, world_size: int) -> Any:
    """Returns a store for a job that needs no port; None lets the ranks meet at MASTER_ADDR."""
    import torch.distributed as dist

    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        return FakeStore()
    return dist.HashStore() if world_size == 1 else None  # type: ignore[attr-defined]


class RankError(AssertionError):
    """A rank failed, died or did not return; the message has its number and its traceback or log.

    If ranks do not return in time, the message has the stack of one of them.
    """


class Ranks:
    """A pool of processes that run functions as the ranks of jobs, one job after another.

    The processes start with the first job and import the frameworks once; on a CPU, the frameworks
    are imported once for all processes. Each job can have a different layout. As a context manager,
    the pool ends its processes. In pytest, use a fixture with session scope::

        @pytest.fixture(scope="session")
        def ranks():
            with Ranks(4) as ranks:
                yield ranks

        def test_sum(ranks):
            assert ranks.run(sum_of_ranks, world_size=2) == [1, 1]

    Args:
        number: Number of processes; a job may use fewer.
        accelerator: `cpu`, or `gpu` with one GPU per process.
        timeout: Time limit of a job in seconds, without the start of the pool.
    """

    def __init__(
        self, number: int, accelerator: Literal["cpu", "gpu"] = "cpu", timeout: float = 120.0
    ) -> None:
        self.number, self.accelerator, self.timeout = number, accelerator, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: list[Connection] = []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., T], *arguments: Any, world_size: int | None = None
    ) -> list[T]:
        """Calls `function(*arguments)` in every rank of a job, with RANK, WORLD_SIZE etc. set.

        After the call, any remaining parallel state is destroyed.

        Args:
            function: Any function; cloudpickle must be able to pickle it and its result.
            *arguments: Arguments of the function, the same in all ranks.
            world_size: Number of ranks of the job; by default all processes of the pool.

        Returns:
            The results of the function, by rank.

        Raises:
            RankError: A rank failed, and the message has the traceback of the first failed rank. Or
                a rank died, and the message has the end of the log. Or ranks did not return in
                time, and the message has a rank's stack.
            ValueError: `world_size` is below 1 or exceeds the number of processes.
        """
        size = self.number if world_size is None else world_size
        if not 1 <= size <= self.number:
            raise ValueError(f"world_size={size}: this pool has {self.number} processes.")
        payload = _by_value(function, arguments)
        if self._process is not None and any(
            _num_gloo_threads(process) > TOO_MANY_THREADS for process in self._pids
        ):
            self.close()
        self._start()
        connections = self._connections[:size]
        with socket.socket() as reserved:  # until the end: the kernel gives its port to nobody else
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("", 0))
            port = str(reserved.getsockname()[1])
            for rank, connection in enumerate(connections):
                environment = {
                    **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
                    **{"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)},
                    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
                }
                connection.send((sys.path, environment, payload))
            return self._collect(connections)

    def close(self) -> None:
        """Ends all processes of the pool; a further job starts new processes."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            self._log.close()

    def _start(self) -> None:
        if self._process is not None:
            return
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115  # `close` closes it
            mode="w+", errors="replace", prefix="ranks-"
        )
        pipes = [Pipe() for _ in range(self.number)]
        ends = [end.fileno() for _, end in pipes]
        threads = max(1, len(os.sched_getaffinity(0)) // self.number)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, self.accelerator, *map(str, ends)],
            env={
                "OMP_NUM_THREADS": str(threads),
                **os.environ,
                "PYTHONPATH": search_path(),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=ends,
            start_new_session=True,
        )
        for _, end in pipes:
            end.close()
        self._connections = [connection for connection, _ in pipes]
        try:
            self._pids: list[int] = [connection.recv() for connection in self._connections]
        except EOFError:
            message = f"the ranks did not start:\n{self._tail()}"
            self.close()
            raise RankError(message) from None

    def _collect(self, connections: list[Connection]) -> list[Any]:
        """Waits for the results of the ranks; ends the pool if a result is missing."""
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        pending: dict[Any, int] = {connection: rank for rank, connection in enumerate(connections)}
        deadline = time.monotonic() + self.timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                rank = pending.pop(connection)
                try:
                    failed_at, answer = pickle.loads(connections[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    log = self._log_of_death(rank)
                    failures.append((0.0, rank, f"it died:\n{log}"))  # sorted as the first
                    continue
                if failed_at is None:
                    results[rank] = answer
                else:
                    failures.append((failed_at, rank, answer))
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        stuck = "" if failures else self._stacks(list(pending.values()))
        if pending or any(answer.startswith("it died") for _, _, answer in failures):
            self.close()
        if stuck:
            raise RankError(f"no result after {self.timeout:g} s:\n{stuck}")
        if failures:
            # The first failure is the cause; later failures may be consequences.
            _, rank, answer = min(failures)
            raise RankError(f"rank {rank} of {len(connections)} failed: {answer}")
        return [results[rank] for rank in range(len(connections))]

    def _stacks(self, pending: list[int]) -> str:
        """Returns the stack of the first pending rank that prints one."""
        for rank in pending:
            self._log.seek(0, os.SEEK_END)
            begin = self._log.tell()
            os.kill(self._pids[rank], signal.SIGUSR2)
            time.sleep(0.3)
            self._log.seek(begin)
            if stack := self._log.read():
                return f"ranks {pending} still run; the stack of rank {rank} is:\n{stack}"
        return f"ranks {pending} are stopped." if pending else ""

    def _log_of_death(self, rank: int) -> str:
        """Returns the end of the log, where `serve` says how the rank ended, within 5 seconds."""
        deadline = time.monotonic() + 5
        while f"\nrank {rank} " not in "\n" + (log := self._tail()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return log

    def _tail(self) -> str:
        return "\n".join(Path(self._log.name).read_text(errors="replace").splitlines()[-30:])


def serve(accelerator: Literal["cpu", "gpu"], *descriptors: str) -> None:
    """Runs in the pool's first process: imports the frameworks and forks the ranks."""
    if accelerator == "cpu":
        # Not for GPUs: a forked process cannot use CUDA if its parent has used CUDA. So on GPUs
        # each rank imports the frameworks itself.
        suspend_collector()
        use_accelerator("cpu")
        resume_collector()
    connections = [Connection(int(descriptor)) for descriptor in descriptors]
    ranks = {}
    for rank, connection in enumerate(connections):
        if not (process := os.fork()):
            for other in connections[rank + 1 :]:
                other.close()
            _serve_rank(connection)
        ranks[process] = rank
        connection.close()
    while ranks:
        process, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        rank = ranks.pop(process)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        print(f"rank {rank} {how}", file=sys.stderr, flush=True)


def _serve_rank(connection: Connection) -> NoReturn:
    """Runs one job after another until the pool closes the connection or ends."""
    faulthandler.register(signal.SIGUSR2, all_threads=False)
    connection.send(os.getpid())
    before = dict(os.environ)
    # A training freezes all objects, which `_end_threads_of_earlier_jobs` could then not collect.
    gc.freeze = _freeze_nothing
    while True:
        try:
            search_path, environment, payload = connection.recv()
        except EOFError:
            os._exit(0)
        sys.path[:] = search_path
        os.environ.update(environment)
        try:
            function, arguments = pickle.loads(payload)
            answer = cloudpickle.dumps((None, function(*arguments)))
        except BaseException as error:
            answer = cloudpickle.dumps((_note_time(error), traceback.format_exc()))
        connection.send_bytes(answer)
        destroy_parallel_state()
        _end_threads_of_earlier_jobs()
        os.environ.clear()
        os.environ.update(before)


def _end_threads_of_earlier_jobs() -> None:
    """Collects the process groups of trainings, whose threads each wake up 100 times a second.

    Cycles through torch's gradient accumulators cannot be collected: see `TOO_MANY_THREADS`.
    """
    if _num_gloo_threads(os.getpid()) > MANY_THREADS:
        gc.collect()


def _freeze_nothing() -> None:
    """Stands in for `gc.freeze` in a rank; the pool's first process has frozen the frameworks."""


def _num_gloo_threads(process: int) -> int:
    """Counts threads by name, because torch's own threads depend on the number of cores."""
    count = 0
    for name in Path(f"/proc/{process}").glob("task/*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended
            count += name.read_text() == "pt_gloo_runloop\n"
    return count


def _by_value(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Pickles a function together with its module, because a rank may be unable to import it."""
    module = sys.modules.get(function.__module__)
    is_ours = function.__module__.partition(".")[0] in ("megakit", "__main__")
    with contextlib.ExitStack() as stack:
        if module is not None and not is_ours:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        return bytes(cloudpickle.dumps((function, arguments)))


def _note_time(error: BaseException) -> float:
    """Stores and returns the time at which an exception was first seen.

    The exception with the earliest time is the cause; those of other ranks follow from it.
    """
    noted: float = vars(error).setdefault("_failed_at", time.monotonic())
    return noted


def _accelerator(requested: AcceleratorName) -> Literal["cpu", "gpu"]:
    from megakit.runtime import cpu

    # After the patches for the CPU, a process cannot use its GPU any more.
    is_on_cpu = cpu.patch_torch.cache_info().currsize > 0
    return "cpu" if is_on_cpu and requested == "auto" else find_accelerator(requested).name
