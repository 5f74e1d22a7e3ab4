"""A real Slurm on this machine alone, for `platforms.py`: started by root, used by anybody."""

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from systems import Failed, System, call, need, need_root

SETTINGS = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Slurm:
    """A running Slurm: its settings' file, and the system whose user sends jobs."""

    settings: Path
    system: System

    def ask(self, *command: object) -> str:
        return call(*command, env={**os.environ, "SLURM_CONF": str(self.settings)})

    def run(self, project: Path, *options: str, **environment: str) -> int:
        """Runs a project's batch file to its end; returns how often the job was requeued."""
        submit = ["sbatch", "--parsable", "--cpus-per-task=1", *options]
        command = f"cd {self.system.inside(project)} && {' '.join(submit)} "
        command += "examples/slurm/tutorial.sbatch"
        job = self.system.run(command, SLURM_CONF=str(self.settings), **environment).strip()
        deadline = time.monotonic() + 1800
        while time.monotonic() < deadline:
            time.sleep(1)
            told = self.ask("scontrol", "show", "job", job)
            state, restarts = (
                found[1] if (found := re.search(rf"{name}=(\w+)", told)) else ""
                for name in ("JobState", "Restarts")
            )
            if state == "COMPLETED":
                return int(restarts)
            if state == "PENDING" and "Reason=BeginTime" in told:
                # A requeued job waits for two minutes, and its next time limit could stop it before
                # it gets any further. Refused while the last start still ends.
                subprocess.run(
                    ["scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=60"],
                    env={**os.environ, "SLURM_CONF": str(self.settings)},
                    capture_output=True,
                    check=False,
                )
            elif state not in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}:
                break
        self.ask("scancel", job)
        printed = project / f"slurm-{job}.out"
        last = printed.read_text()[-600:] if printed.exists() else ""
        raise Failed(f"Slurm's job is {state} after {restarts} restarts. {last}")


@contextmanager
def slurm(folder: Path, system: System) -> Iterator[Slurm]:
    """Starts munged, slurmctld and slurmd, and ends them."""
    need_root()
    need("munged", "slurmctld", "slurmd", "sbatch")
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    settings = folder / "slurm.conf"
    settings.write_text(SETTINGS.format(host=socket.gethostname(), folder=folder))
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--foreground", f"--socket={folder}/munge.socket", *files],
        ["slurmctld", "-D"],
        system.mounted("slurmd", "-D", "-N", socket.gethostname()),  # jobs need the user's mounts
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for daemon in daemons:
            with (folder / f"{len(started)}.log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        daemon,
                        env={**os.environ, "SLURM_CONF": str(settings)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
            time.sleep(2)
        here = Slurm(settings, system)
        if "idle" not in here.ask("sinfo", "--noheader", "--format=%T"):
            logs = "".join(path.read_text()[-300:] for path in sorted(folder.glob("*.log")))
            raise Failed(f"Slurm did not start: {logs}")
        yield here
    finally:
        for process in reversed(started):
            process.kill()  # `unshare` ignores SIGTERM; nothing of theirs is kept
            process.wait(60)
