"""Running the project's scripts as a user does: as processes, reading what they print and write."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    def output(self) -> str:
        """What went to standard output of a command that did not fail."""
        assert self.status == 0, f"status {self.status}\n{self.err[-5000:]}"
        return self.out


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment without what a surrounding job may have set.

    A change to None leaves a variable out. PYTHONPATH is put in front of the one that is there.
    """
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in job and not k.startswith("SLURM_")}
    if (first := changes.get("PYTHONPATH")) is not None and (rest := kept.get("PYTHONPATH")):
        changes["PYTHONPATH"] = f"{first}{os.pathsep}{rest}"
    return {name: value for name, value in {**kept, **changes}.items() if value is not None}


def run(
    *command: object,
    cwd: Path | None = None,
    stdin: str | None = None,
    timeout: float = 600,
    **changes: str | None,
) -> Result:
    """Runs a command to its end; `changes` are variables of its environment."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**changes),
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def run_script(script: str | Path, *arguments: object, **options: Any) -> Result:
    """Runs a script of the project to its end; options are those of `run`."""
    return run(sys.executable, REPOSITORY / script, *arguments, **options)


def stop_and_resume(directory: Path, script: str, *arguments: object) -> None:
    """Stops a script's training as Ctrl-C does after its first steps, and ends it by a new start.

    Args:
        directory: The run directory.
        script: The script.
        arguments: The script's arguments.
    """
    command = [*map(str, (sys.executable, REPOSITORY / script, *arguments))]
    metrics = directory / "metrics.csv"
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as started:
        while started.poll() is None and not (metrics.exists() and len(read_csv(metrics)) > 1):
            time.sleep(0.05)
        started.send_signal(signal.SIGINT)
        _, told = started.communicate(timeout=100)
    assert started.returncode == 130, told
    assert "Stopped after step" in told
    again = run(*command)
    again.output()
    assert "Resuming from" in again.err


def rehearsed(gpus: int = 1, report: Any = None, **more: Any) -> dict[str, Any]:
    """Variables by which a command finds so many GPUs, made of labels; it may write a report."""
    path = os.pathsep.join([str(REPOSITORY / "tests" / "rehearsal" / "hook"), str(REPOSITORY)])
    changes = {"PYTHONPATH": path, "REHEARSE_GPUS": str(gpus), "OMP_NUM_THREADS": "1", **more}
    return changes if report is None else {**changes, "REHEARSE_REPORT": str(report)}


def run_python(*arguments: object, **options: Any) -> Result:
    """Runs Python to its end, wherever it is started with the project's modules."""
    return run(sys.executable, *arguments, **{"PYTHONPATH": str(REPOSITORY), **options})


def output_of(code: str, *arguments: object, **options: Any) -> str:
    """What Python code prints, which has to end without an error."""
    return run_python("-c", code, *arguments, **options).output()


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def accuracy(predictions: Path) -> float:
    rows = read_csv(predictions)
    return sum(row["label"] == row["prediction"] for row in rows) / len(rows)
