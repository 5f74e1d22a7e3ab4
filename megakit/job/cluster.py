"""Reads the job of this process from the environment variables of torchrun or srun."""

import contextlib
import os
import re
import sys
from dataclasses import dataclass

from megakit.errors import UserError
from megakit.runtime.signals import die_with_parent

#: Variables that torchrun and our own launcher (`megakit.job.launch`) set for each process.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: The values of a single process; every other value means a job.
SINGLE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
#: Set for each rank that our own launcher starts: the process id of the launcher.
LAUNCHER = "MEGAKIT_LAUNCHER"
#: Other variables of a job, which Lightning and torch also read in a single process.
OTHERS = (
    *("GROUP_RANK", "NODE_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("SLURM_PROCID", "SLURM_LOCALID"),
)
#: Job names of Slurm's interactive shells, which are steps of one task.
INTERACTIVE_JOBS = ("bash", "interactive")


@dataclass(frozen=True)
class Cluster:
    """The job of this process, as torchrun or srun describes it.

    Attributes:
        launcher: `torchrun` (also for ranks of our own launcher) or `srun`; None for a process that
            was started alone.
        rank: Rank of this process in the job.
        devices: Processes per machine.
        num_nodes: Number of machines.
        num_surplus: Processes that remain after every machine has `devices` processes; has to be 0.
        num_gpus: Number of GPUs of the job on this machine; 0 if unknown. A process may see only
            its own GPU, with srun's `--gpus-per-task` or by its own `CUDA_VISIBLE_DEVICES`.
    """

    launcher: str | None = None
    rank: int = 0
    devices: int = 1
    num_nodes: int = 1
    num_surplus: int = 0
    num_gpus: int = 0

    @property
    def num_processes(self) -> int:
        """Number of processes in the job."""
        return self.devices * self.num_nodes + self.num_surplus

    @property
    def rank_suffix(self) -> str:
        """Suffix for messages that names this rank; empty in a job of one process."""
        return f" (rank {self.rank})" if self.num_processes > 1 else ""


def read_cluster() -> Cluster:
    """Reads the job from the environment, and corrects the environment.

    All libraries read torchrun's variables, so they are set under srun. A single process loses the
    variables that another job has left, since it would try to connect to the other job. The kernel
    kills this process when its launcher, ours or torchrun's, is killed.

    Raises:
        UserError: Variables are missing or invalid.
    """
    given = [name for name in SINGLE if name in os.environ]
    # Lightning's support of Slurm refuses `srun --ntasks`, and requeues jobs on signals that this
    # program handles. Lightning ignores Slurm in a job named "interactive".
    job_name = os.environ.get("SLURM_JOB_NAME")
    if "SLURM_NTASKS" in os.environ:
        os.environ["SLURM_JOB_NAME"] = "interactive"
    try:
        # Lightning leaves LOCAL_RANK=0 to child processes of a notebook, for example.
        is_single = all(os.environ[name] == SINGLE[name] for name in given)
        if not is_single or {*TORCHRUN} <= os.environ.keys():
            if {LAUNCHER, "TORCHELASTIC_RUN_ID"} & os.environ.keys():
                die_with_parent(int(os.environ.get(LAUNCHER) or os.getppid()))
            return _from_torchrun(given)
        tasks = _first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default="1")
        if "SLURM_PROCID" in os.environ and not (job_name in INTERACTIVE_JOBS and tasks == "1"):
            return _from_srun(int(tasks))
    except ValueError as error:
        raise UserError(
            f"the environment variables of torchrun or srun are damaged: {error}. Start the script "
            f"by torchrun or srun; for a single process, unset {' '.join(given) or 'SLURM_PROCID'}."
        ) from error
    for name in (*TORCHRUN, *OTHERS):
        os.environ.pop(name, None)
    return Cluster()


def _from_torchrun(given: list[str]) -> Cluster:
    if missing := [name for name in TORCHRUN if name not in os.environ]:
        values = " ".join(f"{name}={os.environ[name]!s:.60}" for name in given)
        raise UserError(
            f"{values}: torchrun also sets {', '.join(missing)}, which a job needs. Start the "
            f"script by torchrun or srun; for a single process, unset {' '.join(given)}."
        )
    rank, world_size, _, devices = (int(os.environ[name]) for name in SINGLE)
    if not 0 <= rank < world_size or not 1 <= devices <= world_size:
        raise ValueError(f"RANK={rank} WORLD_SIZE={world_size} LOCAL_WORLD_SIZE={devices}")
    int(os.environ["MASTER_PORT"])
    num_nodes, num_surplus = divmod(world_size, devices)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # `share_plan` checks that the processes see different GPUs. Those of our launcher see the same.
    is_own = visible and "," not in visible and LAUNCHER not in os.environ
    return Cluster("torchrun", rank, devices, num_nodes, num_surplus, devices if is_own else 0)


def _from_srun(tasks: int) -> Cluster:
    # A step may use only a part of the allocation, so the sizes of the step come first.
    nodes = int(_first("SLURM_STEP_NUM_NODES", "SLURM_NNODES", default="1"))
    devices, num_surplus = divmod(tasks, nodes)
    rank = int(os.environ["SLURM_PROCID"])
    if not 0 <= rank < tasks:
        raise ValueError(f"SLURM_PROCID={rank}, with {tasks} tasks")
    job, step = int(_first("SLURM_JOB_ID")), int(_first("SLURM_STEP_ID"))
    hosts = _first(
        "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST", default="127.0.0.1"
    )
    # node[03-05,09],other -> node03,other -> node03
    host = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", hosts).split(",")[0]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": _first("SLURM_LOCALID", default=str(rank % max(1, devices))),
        "GROUP_RANK": _first("SLURM_NODEID", default=str(rank // max(1, devices))),
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": str(devices),
    }
    os.environ.setdefault("MASTER_ADDR", host)
    # All ranks compute the same port from the number of the job.
    int(os.environ.setdefault("MASTER_PORT", str(15_000 + (job + 1009 * step) % 10_000)))
    num_gpus = int(_first("SLURM_GPUS_ON_NODE"))
    return Cluster("srun", rank, devices, nodes, num_surplus, num_gpus)


def _first(*names: str, default: str = "0") -> str:
    """Returns the first value that is not empty."""
    return next((value for name in names if (value := os.environ.get(name))), default)


def has_process_group() -> bool:
    """Returns whether the job's default process group is initialized."""
    if "torch" not in sys.modules:
        return False
    from torch import distributed as dist

    return bool(dist.is_initialized())


def is_first_to_fail() -> bool:
    """Returns whether this rank is the first to fail; the first failure causes later failures."""
    return is_first("failed")


def is_first(event: str) -> bool:
    """Returns whether this rank is the first to report an event, and the event's first report."""
    if not has_process_group():  # no other rank waits for this rank
        return True
    from torch import distributed as dist

    # An error means that the rank that hosts the store has ended, and has reported the reason.
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        return dist.get_world_size() == 1 or bool(store.add(f"megakit/{event}", 1) == 1)
    return False
