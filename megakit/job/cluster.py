"""Reads the job of this process from the environment variables of torchrun or srun."""

import contextlib
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import environ, getppid
from typing import Any, ClassVar, TypeVar

from megakit.errors import UserError
from megakit.runtime.signals import die_with_parent

T = TypeVar("T")
#: Seconds for what may be late on another machine: a name, an answer of the store, a file.
PATIENCE = 20
#: The variables of a job and their values in a single process; other values mean a job.
SINGLE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
#: Variables that torchrun and our own launcher (`megakit.job.launch`) set for each process.
TORCHRUN = (*SINGLE, "MASTER_ADDR", "MASTER_PORT")
#: Set for each rank that our own launcher starts: the process id of the launcher.
LAUNCHER = "MEGAKIT_LAUNCHER"
#: Set for each rank that torchrun starts.
ELASTIC = "TORCHELASTIC_RUN_ID"
#: Other variables of a job, which Lightning and torch also read in a single process.
OTHERS = ("GROUP_RANK", "NODE_RANK", "TORCHELASTIC_USE_AGENT_STORE")
#: Variables of torchrun, and those that srun sets instead.
SRUN = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "GROUP_RANK": "SLURM_NODEID",
}


@dataclass(frozen=True)
class Cluster:
    """The job of this process, as torchrun or srun describes it.

    Attributes:
        launcher: `torchrun` (also for ranks of our own launcher) or `srun`; None for a process that
            was started alone.
        rank: Rank of this process in the job.
        devices: Processes per machine.
        num_nodes: Number of machines.
        store: Torch's store that connects the ranks of the job; None until they are connected.
    """

    store: ClassVar[Any] = None
    launcher: str | None = None
    rank: int = 0
    devices: int = 1
    num_nodes: int = 1

    @property
    def num_processes(self) -> int:
        """Number of processes in the job."""
        return self.devices * self.num_nodes


def read_cluster() -> Cluster:
    """Reads the job from the environment, and corrects the environment.

    All libraries read torchrun's variables, so they are set under srun. A single process loses the
    variables that another job has left, since it would try to connect to the other job. A step of
    srun with one task, such as an interactive shell, is a single process. The kernel kills this
    process when its launcher, ours or torchrun's, is killed.

    Raises:
        UserError: Variables are missing or invalid.
    """
    # Lightning's support of Slurm refuses `srun --ntasks`, and requeues jobs on signals that this
    # program handles. Lightning ignores Slurm in a job named "interactive".
    if "SLURM_NTASKS" in environ:
        environ["SLURM_JOB_NAME"] = "interactive"
    launcher = None
    if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":  # srun sets it, but a batch file lacks it
        launcher = "srun"
    # Lightning leaves LOCAL_RANK=0 to child processes of a notebook, for example.
    if any(environ.get(name, value) != value for name, value in SINGLE.items()):
        launcher = "torchrun"
    if {LAUNCHER, ELASTIC} & environ.keys():
        launcher = "torchrun"
        die_with_parent(int(environ.get(LAUNCHER) or getppid()))
    if launcher is None:
        for name in (*TORCHRUN, *OTHERS):
            environ.pop(name, None)
        return Cluster()
    try:
        return _read_variables(launcher)
    except (KeyError, ValueError, ZeroDivisionError):
        values = " ".join(f"{name}={environ.get(name, '')}" for name in TORCHRUN)
        raise UserError(
            f"{values}: a process of a job has all of these variables, RANK is below WORLD_SIZE, "
            "and each machine has the same number of processes. Start the script by torchrun or "
            "srun, which set them (--nproc-per-node, --ntasks-per-node); for a single process, "
            "unset them, or SLURM_STEP_NUM_TASKS under srun."
        ) from None


def _read_variables(launcher: str) -> Cluster:
    if launcher == "srun":
        _translate_srun()
    rank, world_size, _, devices, _ = (int(environ[name]) for name in (*SINGLE, "MASTER_PORT"))
    is_rank = 0 <= rank < world_size and 1 <= devices <= world_size
    if not (is_rank and environ["MASTER_ADDR"]) or world_size % devices:
        raise ValueError
    return Cluster(launcher, rank, devices, world_size // devices)


def _translate_srun() -> None:
    """Sets torchrun's variables."""
    environ.update({name: environ[own] for name, own in SRUN.items()})
    tasks, num_nodes = int(environ["WORLD_SIZE"]), int(environ["SLURM_STEP_NUM_NODES"])
    if tasks % num_nodes:
        raise ValueError
    environ["LOCAL_WORLD_SIZE"] = str(tasks // num_nodes)
    # node[03-05,09],other -> node03,other -> node03
    hosts = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", environ["SLURM_STEP_NODELIST"])
    environ.setdefault("MASTER_ADDR", hosts.split(",")[0])
    # All ranks compute the same port from the numbers of the job and of its step.
    number = int(environ["SLURM_JOB_ID"]) + 1009 * int(environ["SLURM_STEP_ID"])
    environ.setdefault("MASTER_PORT", str(15_000 + number % 10_000))


def is_first(event: str) -> bool:
    """Returns whether this rank is the first to report an event, and the event's first report."""
    # An error means that the rank that hosts the store has ended, and has reported the reason.
    with contextlib.suppress(RuntimeError):
        try:
            return Cluster.store is None or timely(PATIENCE, Cluster.store.add, event, 1) == 1
        except TimeoutError:  # that rank hangs, so another one has to report
            return environ["RANK"] == "1"
    return False


def timely(seconds: float, call: Callable[..., T], *args: Any) -> T:
    """Calls a function in a thread, and raises a TimeoutError if it does not return in time.

    Torch's store waits without an end for a process that hangs, and lets Python handle no signal.
    """
    return ThreadPoolExecutor(1).submit(call, *args).result(seconds)


def until(seconds: float, call: Callable[[], T]) -> T:
    """Calls a function until it returns something true, for some seconds; returns what it did."""
    deadline = time.monotonic() + seconds
    while not (found := call()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
