"""Jobs of the launcher whose ranks succeed, fail and are ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.scripts import REPOSITORY, environment

# Launcher and rank in one file, as the project's scripts are. Each rank writes what it got, then
# does what the command line says for it.
JOB = """
import json, os, signal, sys, time
from pathlib import Path

folder, count, grace = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
tasks = sys.argv[4:]
from megakit.job import launch
from megakit.job.cluster import read_cluster
from megakit.runtime.signals import StopRequest

if "RANK" not in os.environ:
    from megakit.job.script import begin_script
    from megakit.reporting.console import Console

    begin_script()

    launch.GRACE = grace
    StopRequest.SAME_REQUEST_SECONDS = 0
    sys.exit(launch.launch(count, Console()))

read_cluster()
rank = int(os.environ["RANK"])
task = tasks[rank % len(tasks)]

def stop(number, frame):
    (folder / f"signal-{rank}").write_text(signal.Signals(number).name)
    if task == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if task != "goes on":
        # A second signal during Python's own exit would print a traceback.
        os._exit({"SIGINT": 130, "SIGHUP": 129}.get(signal.Signals(number).name, 143))

for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
    if task == "stubborn":
        signal.signal(number, signal.SIG_IGN)
    elif task != "bare" and signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, stop)

record = folder / f".rank-{rank}"
record.write_text(json.dumps({"pid": os.getpid(), "argv": sys.argv, "environ": dict(os.environ)}))
record.rename(folder / f"rank-{rank}")
while len(list(folder.glob("rank-*"))) < count:
    time.sleep(0.01)
if task == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if task.isdigit():
    sys.exit(int(task))
if task == "late":
    time.sleep(0.5)
    (folder / "late").touch()
    sys.exit(143)
for _ in range(1200):  # one long sleep may begin just after a signal, and delays its handler
    time.sleep(0.05)
"""


class Job:
    def __init__(
        self,
        folder: Path,
        count: int,
        *tasks: str,
        grace: float = 20.0,
        ignores_children: bool = False,
        **changes: Any,
    ):
        script = folder / "job.py"
        script.write_text(JOB)
        self.folder, self.count = folder, count
        self.arguments = [str(script), str(folder), str(count), str(grace), *tasks]
        self.process = subprocess.Popen(
            [sys.executable, *self.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(PYTHONPATH=str(REPOSITORY), **changes),
            start_new_session=True,
            preexec_fn=lambda: ignores_children and signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        )

    def ranks(self) -> list[dict[str, Any]]:
        """What each rank got, once all of them run."""
        wait_until(lambda: len(list(self.folder.glob("rank-*"))) == self.count)
        return [json.loads((self.folder / f"rank-{k}").read_text()) for k in range(self.count)]

    def end(self) -> tuple[int, str]:
        """Waits for the launcher; returns its exit status and what it printed on stderr."""
        out, err = self.process.communicate(timeout=60)
        assert out == ""
        return self.process.returncode, err

    def signals(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.folder.glob("signal-*")}


@contextlib.contextmanager
def job(*arguments: Any, **options: Any) -> Iterator[Job]:
    """A job that leaves no process behind, whatever the test finds."""
    started = Job(*arguments, **options)
    try:
        yield started
    finally:
        for path in started.folder.glob("rank-*"):
            pid = json.loads(path.read_text())["pid"]
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        if started.process.poll() is None:
            started.process.kill()
        started.process.communicate()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def alive(ranks: list[dict[str, Any]]) -> list[int]:
    return [rank["pid"] for rank in ranks if is_alive(rank["pid"])]
