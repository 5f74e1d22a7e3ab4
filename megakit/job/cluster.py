"""Reads the job of this process from the environment variables of torchrun or srun."""

import os
import re
from dataclasses import dataclass

from megakit.errors import UserError

#: Variables that torchrun and our own launcher (`megakit.job.launch`) set for each process, with
#: the values that a single process may have; every other value means a job.
RANK_VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
#: Other variables of a job, which Lightning and torch also read in a single process.
OTHER_VARIABLES = (
    *("GROUP_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("SLURM_PROCID", "SLURM_LOCALID"),
)
#: Job names of Slurm's interactive shells.
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
        local_rank: Rank of this process on its machine.
        node: Index of this machine in an srun job; otherwise 0.
        num_gpus: Number of GPUs of an srun job on this machine; 0 if unknown. With
            `--gpus-per-task`, a process sees only its own GPU.
        address: Host name or address of the machine of rank 0.
        ports: Ports at which rank 0 may listen, in the order in which the ranks try them.
        name: Distinguishes this job from another job on the same machines.
    """

    launcher: str | None = None
    rank: int = 0
    devices: int = 1
    num_nodes: int = 1
    num_surplus: int = 0
    local_rank: int = 0
    node: int = 0
    num_gpus: int = 0
    address: str = ""
    ports: tuple[int, ...] = ()
    name: str = "-"

    @classmethod
    def from_environment(cls) -> "Cluster":
        """Reads the variables that torchrun, our own launcher or srun set.

        Raises:
            UserError: Lists every variable that is missing or invalid.
        """
        variables = _Variables()
        given = [name for name in RANK_VARIABLES if name in os.environ]
        # An interactive Slurm shell is a step of one task. Steps started in the shell have the
        # same job name.
        is_shell = (
            os.environ.get("SLURM_JOB_NAME") in INTERACTIVE_JOBS
            and os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
        )
        is_single = all(os.environ[name] == RANK_VARIABLES[name] for name in given)
        has_rendezvous = any(name in os.environ for name in RENDEZVOUS_VARIABLES)
        if {"RANK", "LOCAL_WORLD_SIZE"} <= {*given} and (has_rendezvous or not is_single):
            variables.require_all(given)
            cluster = _from_torchrun(variables)
        elif "SLURM_PROCID" in os.environ and not is_shell:
            cluster = _from_srun(variables)
        else:
            cluster = cls()
            if not is_single:
                variables.require_all(given)
        if variables.problems:
            raise UserError(variables.problems)
        return cluster

    @property
    def num_processes(self) -> int:
        """Number of processes in the job."""
        return self.devices * self.num_nodes + self.num_surplus

    @property
    def rank_suffix(self) -> str:
        """Suffix for messages that names this rank; empty in a job of one process."""
        return f" (rank {self.rank})" if self.num_processes > 1 else ""

    def torchrun_variables(self) -> dict[str, str]:
        """Returns this job as torchrun's variables, which all libraries read, without the port."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "GROUP_RANK": str(self.node),
            "WORLD_SIZE": str(self.devices * self.num_nodes),
            "LOCAL_WORLD_SIZE": str(self.devices),
            "MASTER_ADDR": self.address,
        }

    def correct_environment(self) -> None:
        """Removes or overrides variables that would mislead the frameworks."""
        # Lightning's support of Slurm refuses `srun --ntasks`, and requeues jobs on signals that
        # this program handles. Lightning ignores Slurm in a job named "interactive".
        if "SLURM_NTASKS" in os.environ:
            os.environ["SLURM_JOB_NAME"] = "interactive"
        # NeMo fails if this variable of torch is not a number, also on a CPU.
        if not os.environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "0").isdigit():
            del os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]
        if self.launcher != "torchrun":
            # Lightning reads NODE_RANK as the index of this machine.
            os.environ.pop("NODE_RANK", None)
        if self.num_processes == 1 and self.launcher != "torchrun":
            # With variables of another job, a single process would try to connect to rank 0 of
            # the other job.
            for name in (*RANK_VARIABLES, *RENDEZVOUS_VARIABLES, *OTHER_VARIABLES):
                os.environ.pop(name, None)


def _from_torchrun(variables: "_Variables") -> Cluster:
    world_size = variables.number("WORLD_SIZE", 1)
    devices = variables.number("LOCAL_WORLD_SIZE", 1, world_size, "WORLD_SIZE")
    for name in ("GROUP_RANK", "NODE_RANK"):
        variables.number(name, 0)
    num_nodes, num_surplus = divmod(world_size or 1, devices or 1)
    local_rank = variables.number("LOCAL_RANK", 0, devices and devices - 1, "LOCAL_WORLD_SIZE")
    return Cluster(
        launcher="torchrun",
        rank=variables.number("RANK", 0, world_size and world_size - 1, "WORLD_SIZE") or 0,
        devices=devices or 1,
        num_nodes=num_nodes,
        num_surplus=num_surplus,
        local_rank=local_rank or 0,
        address=variables.address(),
        ports=(variables.number("MASTER_PORT", 1, 65_535) or 1,),
        name=os.environ.get("TORCHELASTIC_RUN_ID", "-"),
    )


def _from_srun(variables: "_Variables") -> Cluster:
    # A step may use only a part of the allocation, so the sizes of the step come first. A batch
    # script also has SLURM_PROCID, but possibly no number of tasks.
    tasks_name = _first_set("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes_name = _first_set("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    tasks = variables.number(tasks_name, 1, default=1)
    nodes = variables.number(nodes_name, 1, tasks, tasks_name, default=1)
    job = variables.number("SLURM_JOB_ID", 0, default=0) or 0
    step = variables.number("SLURM_STEP_ID", 0, default=0) or 0
    devices, num_surplus = divmod(tasks or 1, nodes or 1)
    rank = variables.number("SLURM_PROCID", 0, tasks and tasks - 1, tasks_name) or 0
    port = variables.number("MASTER_PORT", 1, 65_535)
    # Eight ports that follow from the number of the job, as other programs may use some of them.
    ports = (15_000 + (job + 1000 * step + 1009 * turn) % 10_000 for turn in range(8))
    return Cluster(
        launcher="srun",
        rank=rank,
        devices=devices,
        num_nodes=nodes or 1,
        num_surplus=num_surplus,
        local_rank=variables.number("SLURM_LOCALID", 0, default=rank % max(1, devices)) or 0,
        node=variables.number("SLURM_NODEID", 0, default=rank // max(1, devices)) or 0,
        num_gpus=variables.number("SLURM_GPUS_ON_NODE", 0, default=0) or 0,
        address=variables.address(
            "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST", default="127.0.0.1"
        ),
        ports=(port,) if port else tuple(ports),
        name=f"{job}.{step}",
    )


def _first_set(*names: str) -> str:
    """Returns the first name whose variable has a value; the last name if none has one."""
    return next((name for name in names if os.environ.get(name)), names[-1])


class _Variables:
    """Reads environment variables and collects the problems in them."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def number(
        self,
        name: str,
        least: int,
        most: int | None = None,
        most_follows: str = "",
        default: int | None = None,
    ) -> int | None:
        """Returns the integer in a variable: the default if unset, None if invalid.

        `most_follows` names the variable that `most` comes from, for the message.
        """
        text = os.environ.get(name)
        if text is None:
            return default
        is_number = text.isascii() and text.isdigit() and len(text) < 19
        if is_number and least <= int(text) and (most is None or int(text) <= most):
            return int(text)
        rule = f"from {least:,} to {most:,}" if most is not None else f"of at least {least:,}"
        reason = f", as {most_follows} is {os.environ.get(most_follows)}" if most_follows else ""
        self._refuse(name, f"has to be a whole number {rule}{reason}")
        return None

    def address(self, *node_lists: str, default: str = "") -> str:
        """Returns MASTER_ADDR; if unset, the first host in the first node list with a value."""
        name = "MASTER_ADDR"
        if name not in os.environ and node_lists:
            name = _first_set(*node_lists)
        text = os.environ.get(name, default)
        # node[03-05,09],other -> node03,other -> node03
        host = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", text).split(",")[0]
        try:
            host.encode("idna")
            is_host = bool(re.fullmatch(r"[\w.:%-]+", host))
        except UnicodeError:
            is_host = False
        if not is_host and name in os.environ:
            self._refuse(name, "has to be the name or address of the machine of rank 0")
        return host

    def _refuse(self, name: str, rule: str) -> None:
        self.problems.append(
            f"{name}={_quoted(os.environ[name])}: {rule}. torchrun and srun set {name}; outside of "
            f"a job, unset {name}."
        )

    def require_all(self, given: list[str]) -> None:
        """Adds a problem if only a part of torchrun's variables is set."""
        names = (*RANK_VARIABLES, *RENDEZVOUS_VARIABLES)
        if missing := [name for name in names if name not in os.environ]:
            values = " ".join(f"{name}={_quoted(os.environ[name])}" for name in given)
            self.problems.append(
                f"{values}: torchrun also sets {', '.join(missing)}, which a job needs. Start the "
                f"script by torchrun or srun; for a single process, unset {' '.join(given)}."
            )


def _quoted(text: str) -> str:
    """Returns a value for a message: at most 60 characters of it, quoted unless a plain word."""
    short = text if len(text) <= 60 else text[:60] + "..."
    return short if re.fullmatch(r"[\w.:-]+", short, re.ASCII) else ascii(short)
