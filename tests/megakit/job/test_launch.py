"""The ranks that our launcher starts, what a signal does, and how the job ends with its ranks."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megakit.runtime.signals import exit_status
from tests.scripts import REPOSITORY, environment, run_python

# Launcher and rank in one file, as the project's scripts are. Each rank writes its id, then
# does what the command line says for it.
JOB = """
import os, signal, sys, time
from pathlib import Path

folder, count, grace = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
tasks = sys.argv[4:]
from megakit.job import launch
from megakit.job.cluster import read_cluster
from megakit.runtime.signals import StopRequest

if "RANK" not in os.environ:
    from megakit.job.script import begin_script
    from megakit.job.console import Console

    begin_script()

    launch.GRACE = grace
    StopRequest.SAME_REQUEST_SECONDS = 0
    sys.exit(launch.launch(count, Console()))

read_cluster()
rank = int(os.environ["RANK"])
task = tasks[rank]

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
    elif signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, stop)

record = folder / f".rank-{rank}"
record.write_text(str(os.getpid()))
record.rename(folder / f"rank-{rank}")
while len(list(folder.glob("rank-*"))) < count:
    time.sleep(0.01)
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
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *tasks: str, grace: float = 20.0, text: str = JOB) -> None:
        """Starts a rank for each task."""
        script, self.count = self.folder / "job.py", len(tasks)
        script.write_text(text)
        self.process = subprocess.Popen(
            [sys.executable, script, self.folder, str(self.count), str(grace), *tasks],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(PYTHONPATH=str(REPOSITORY)),
            start_new_session=True,
        )

    def ranks(self) -> list[int]:
        """The processes' ids, once all of them run."""
        wait_until(lambda: len(list(self.folder.glob("rank-*"))) == self.count)
        return [int((self.folder / f"rank-{k}").read_text()) for k in range(self.count)]

    def end(self) -> tuple[int, str]:
        """Waits for the launcher; returns its exit status and what it printed on stderr."""
        out, err = self.process.communicate(timeout=60)
        assert out == ""
        return self.process.returncode, err

    def signals(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.folder.glob("signal-*")}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job that leaves no process behind, whatever the test finds."""
    job = Job(tmp_path)
    yield job
    for path in tmp_path.glob("rank-*"):
        if is_alive(pid := int(path.read_text())):
            os.kill(pid, signal.SIGKILL)
    job.process.kill()
    job.process.communicate()


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


@pytest.mark.parametrize(
    ("tasks", "grace", "status"),
    [
        (("stubborn", "2"), 20.0, 2),  # a rank that refuses has said why
        (("stubborn", "143"), 1.0, 143),
    ],
)
def test_the_end_of_one_rank_ends_the_others(
    job: Job, tasks: tuple[str, ...], grace: float, status: int
) -> None:
    job.start(*tasks, grace=grace)
    ranks = job.ranks()
    assert job.end() == (status, "")
    assert list(filter(is_alive, ranks)) == []


def test_a_rank_that_stops_gives_another_the_time_to_save(job: Job) -> None:
    job.start("143", "late")
    assert job.end() == (143, "")
    assert (job.folder / "late").exists()
    assert job.signals() == {}


def test_a_second_signal_kills_ranks_that_go_on(job: Job) -> None:
    job.start("goes on", "goes on")
    ranks = job.ranks()
    job.process.send_signal(signal.SIGTERM)
    wait_until(lambda: len(job.signals()) == 2)
    assert len(list(filter(is_alive, ranks))) == 2
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == (143, "")
    assert list(filter(is_alive, ranks)) == []


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGHUP, False), (signal.SIGINT, True)])
def test_signals_are_forwarded_once(job: Job, number: signal.Signals, to_all: bool) -> None:
    """To the launcher alone, as `kill` sends it; or to all processes, as a terminal does."""
    job.start("sleep", "sleep")
    ranks = job.ranks()
    (os.killpg if to_all else os.kill)(job.process.pid, number)
    assert job.end() == (exit_status(number), "")
    assert list(filter(is_alive, ranks)) == []
    assert job.signals() == {"signal-0": number.name, "signal-1": number.name}


def test_a_rank_that_is_killed_while_it_stops_is_a_failure(job: Job) -> None:
    """By a lack of memory, for example: nothing was saved."""
    job.start("dies")
    job.ranks()
    job.process.send_signal(signal.SIGTERM)
    status, err = job.end()
    assert (status, "was killed by SIGKILL" in err) == (1, True)


# ---- Forks ----

FORK = """
import os, sys, time
from pathlib import Path

from megakit.job.launch import run_in_fork
from megakit.job.script import begin_script

def work():
    begin_script()
    Path(sys.argv[1], ".fork").write_text(str(os.getpid()))
    Path(sys.argv[1], ".fork").rename(Path(sys.argv[1], "rank-0"))
    for _ in range(1200):  # one long sleep may begin just after a signal, and delays its handler
        time.sleep(0.05)

begin_script()
sys.exit(run_in_fork(work))
"""


@pytest.mark.parametrize(
    ("number", "to_all", "status"),
    [
        (signal.SIGHUP, False, 129),
        (signal.SIGINT, True, 130),
        (signal.SIGKILL, False, -9),
    ],
)
def test_a_signal_ends_a_fork(job: Job, number: signal.Signals, to_all: bool, status: int) -> None:
    """Sent to the first process alone, as `kill` does it; or to both, as Ctrl-C does it."""
    job.start("sleep", text=FORK)
    (fork,) = job.ranks()
    (os.killpg if to_all else os.kill)(job.process.pid, number)
    assert job.end() == (status, "")
    wait_until(lambda: not is_alive(fork), 10)


def test_the_statuses_of_forks() -> None:
    program = """
import os, sys
from megakit.job.launch import run_in_fork
def die(): os.kill(os.getpid(), 9)
print(*map(run_in_fork, (lambda: None, lambda: sys.exit(7), lambda: 1 / 0, die)))
out, into = os.pipe()
run_in_fork(lambda: os.read(out, 1), meanwhile=lambda: os.write(into, b"."))  # the fork waits
"""
    done = run_python("-c", program, cwd=REPOSITORY)
    assert (done.out, "ZeroDivisionError" in done.err) == ("0 7 1 137\n", True)
