"""The launcher and the fork with real processes that succeed, fail and are ended."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from megakit.runtime.signals import STOP_SIGNALS, exit_status
from tests.scripts import REPOSITORY, environment

# Launcher and rank in one file, as the project's scripts are. Each rank writes what it got, then
# does what the command line says for it. `--grace` shortens the time that stubborn ranks are given.
JOB = """
import json, os, signal, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
count, grace = int(sys.argv[2]), float(sys.argv[3])
tasks = sys.argv[4:]

if "RANK" not in os.environ:
    from megakit.reporting.console import Console
    from megakit.job import launch

    launch.GRACE = grace
    sys.exit(launch.launch(count, Console(), {"FROM_THE_LAUNCHER": "yes"}))

rank = int(os.environ["RANK"])
task = tasks[rank % len(tasks)]

def wait_for_all():
    while len(list(folder.glob("rank-*"))) < count:
        time.sleep(0.01)

def stop(number, frame):
    (folder / f"signal-{rank}").write_text(signal.Signals(number).name)
    if task == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if task != "goes on":
        sys.exit({"SIGINT": 130, "SIGHUP": 129}.get(signal.Signals(number).name, 143))

for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
    if task == "stubborn":
        signal.signal(number, signal.SIG_IGN)
    elif task != "bare" and signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, stop)

record = folder / f".rank-{rank}"
record.write_text(json.dumps({"pid": os.getpid(), "argv": sys.argv, "environ": dict(os.environ)}))
record.rename(folder / f"rank-{rank}")
if task == "killed":
    wait_for_all()
    os.kill(os.getpid(), signal.SIGKILL)
if task.isdigit():
    wait_for_all()
    sys.exit(int(task))
if task == "late":
    time.sleep(0.5)
    (folder / "late").touch()
    sys.exit(143)
for _ in range(1200):  # one long sleep may begin just after a signal, and delays its handler
    time.sleep(0.05)
"""


class Job:
    def __init__(self, folder, count, *tasks, grace=20.0, before=None, code="", **variables):
        script = folder / "job.py"
        script.write_text(code + JOB)
        self.folder, self.count = folder, count
        self.arguments = [str(script), str(folder), str(count), str(grace), *tasks]
        self.process = subprocess.Popen(
            [sys.executable, *self.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(PYTHONPATH=str(REPOSITORY), **variables),
            start_new_session=True,
            preexec_fn=before,
        )

    def ranks(self):
        """What each rank got, once all of them run."""
        wait_until(lambda: len(list(self.folder.glob("rank-*"))) == self.count)
        return [json.loads((self.folder / f"rank-{k}").read_text()) for k in range(self.count)]

    def end(self):
        """Waits for the launcher; returns its exit status and what it printed on stderr."""
        out, err = self.process.communicate(timeout=60)
        assert out == ""
        return self.process.returncode, err

    def signals(self):
        return {path.name: path.read_text() for path in self.folder.glob("signal-*")}


@contextmanager
def job(*args, **options):
    """A job that leaves no process behind, whatever the test finds."""
    started = Job(*args, **options)
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


def is_alive(pid):
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def alive(ranks):
    return [rank["pid"] for rank in ranks if is_alive(rank["pid"])]


def test_every_rank_knows_its_place(tmp_path):
    with job(tmp_path, 3, "0") as started:
        ranks = started.ranks()
        assert started.end() == (0, "")
    for number, rank in enumerate(ranks):
        assert rank["argv"] == started.arguments
        expected = {
            **{"RANK": str(number), "LOCAL_RANK": str(number)},
            **{"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "0"},
            **{"MASTER_ADDR": "127.0.0.1", "FROM_THE_LAUNCHER": "yes"},
        }
        assert expected.items() <= rank["environ"].items()
    (port,) = {rank["environ"]["MASTER_PORT"] for rank in ranks}
    assert 1024 <= int(port) < 65536


@pytest.mark.parametrize("number", ["1", "3"])
def test_ranks_compute_in_one_thread_unless_told_otherwise(tmp_path, monkeypatch, number):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    told = {} if number == "1" else {"OMP_NUM_THREADS": number}
    with job(tmp_path, 1, "0", **told) as started:
        (rank,) = started.ranks()
        assert started.end() == (0, "")
    assert rank["environ"]["OMP_NUM_THREADS"] == number


def test_one_rank_fails_and_the_others_end(tmp_path):
    with job(tmp_path, 3, "sleep", "3", "sleep") as started:
        ranks = started.ranks()
        status, err = started.end()
        assert status == 3
        assert alive(ranks) == []
        assert started.signals() == {"signal-0": "SIGTERM", "signal-2": "SIGTERM"}
    (line,) = err.splitlines()
    assert "Rank 1" in line
    assert "3" in line


def test_a_killed_rank_is_a_failure_of_the_job(tmp_path):
    with job(tmp_path, 2, "sleep", "killed") as started:
        ranks = started.ranks()
        status, err = started.end()
        assert status == 1
        assert alive(ranks) == []
    killed = f"Rank 1 (process {ranks[1]['pid']}) was killed by SIGKILL"
    assert err == f"{killed}; ending the other ranks.\n"


def test_a_killed_rank_is_named_where_no_other_is_left(tmp_path):
    with job(tmp_path, 1, "killed") as started:
        (rank,) = started.ranks()
        assert started.end() == (1, f"Rank 0 (process {rank['pid']}) was killed by SIGKILL.\n")


def test_a_rank_that_is_killed_while_it_stops_is_a_failure(tmp_path):
    """By a lack of memory, for example: nothing was saved."""
    with job(tmp_path, 1, "dies") as started:
        (rank,) = started.ranks()
        started.process.send_signal(signal.SIGTERM)
        assert started.end() == (1, f"Rank 0 (process {rank['pid']}) was killed by SIGKILL.\n")


def test_a_rank_that_refuses_its_input_has_said_so_itself(tmp_path):
    with job(tmp_path, 2, "2", "sleep") as started:
        ranks = started.ranks()
        assert started.end() == (2, "")
        assert alive(ranks) == []


def test_a_rank_that_does_not_listen_is_killed(tmp_path):
    with job(tmp_path, 2, "1", "stubborn", grace=1.0) as started:
        ranks = started.ranks()
        status, err = started.end()
        assert status == 1
        assert alive(ranks) == []
    assert "Rank 0" in err


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signals_are_handed_on(tmp_path, number):
    """A signal to the launcher alone, as `kill` sends it, or a program that supervises it."""
    with job(tmp_path, 2, "sleep") as started:
        ranks = started.ranks()
        started.process.send_signal(number)
        assert started.end() == (exit_status(number), "")
        assert alive(ranks) == []
        assert started.signals() == {"signal-0": number.name, "signal-1": number.name}


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_all_processes(tmp_path, number):
    """As a terminal sends SIGINT and SIGHUP to launcher and ranks alike."""
    with job(tmp_path, 2, "sleep") as started:
        ranks = started.ranks()
        os.killpg(started.process.pid, number)
        assert started.end() == (exit_status(number), "")
        assert alive(ranks) == []


def test_a_second_signal_ends_ranks_that_do_not_listen(tmp_path):
    code = "from megakit.runtime.signals import StopRequest\nStopRequest.SAME_REQUEST_SECONDS = 0\n"
    with job(tmp_path, 2, "goes on", code=code) as started:
        ranks = started.ranks()
        started.process.send_signal(signal.SIGTERM)
        wait_until(lambda: len(started.signals()) == 2)
        assert len(alive(ranks)) == 2
        started.process.send_signal(signal.SIGTERM)
        assert started.end() == (143, "")
        assert alive(ranks) == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_is_ignored_at_the_start_stays_ignored(tmp_path, number):
    def ignore():
        signal.signal(number, signal.SIG_IGN)

    with job(tmp_path, 2, "sleep", before=ignore) as started:
        ranks = started.ranks()
        os.killpg(started.process.pid, number)
        started.process.send_signal(number)
        time.sleep(0.3)
        assert len(alive(ranks)) == 2
        started.process.send_signal(signal.SIGTERM)
        assert started.end() == (143, "")
        assert started.signals() == {"signal-0": "SIGTERM", "signal-1": "SIGTERM"}


SIGNALLED = """
import os, signal, subprocess, sys

fork = os.fork
class Popen(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        open(f"{sys.argv[1]}/started-{options['env']['RANK']}", "x").close()
        if options["env"]["RANK"] == LAST:
            os.kill(os.getpid(), signal.SIGTERM)

def fork_watcher():
    child = fork()
    if child and LAST is None:
        os.kill(os.getpid(), signal.SIGTERM)
    return child

subprocess.Popen, os.fork = Popen, fork_watcher
"""


@pytest.mark.parametrize("last", [None, "0", "1"])
def test_a_signal_while_ranks_are_started(tmp_path, last):
    """Every rank that has been started receives it, and no other rank is started."""
    with job(tmp_path, 3, "bare", grace=1000.0, code=f"LAST = {last!r}" + SIGNALLED) as started:
        assert started.end() == (143, "")
        assert len(list(tmp_path.glob("started-*"))) == (0 if last is None else int(last) + 1)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_before_ranks_are_ready_for_it(tmp_path, number):
    """While they still import, the signal itself ends them: stopped as asked, not failed."""
    with job(tmp_path, 2, "bare") as started:
        ranks = started.ranks()
        started.process.send_signal(number)
        status, _ = started.end()
        assert status == exit_status(number)
        assert alive(ranks) == []


@pytest.mark.parametrize("status", [129, 130, 143])
def test_stopped_ranks_are_no_failure(tmp_path, status):
    """They say themselves that they stopped; the launcher adds nothing, and passes it on."""
    with job(tmp_path, 2, str(status)) as started:
        assert started.end() == (status, "")


def test_a_stopped_rank_does_not_wait_for_ever_for_another(tmp_path):
    with job(tmp_path, 2, "143", "sleep", grace=0.2) as started:
        ranks = started.ranks()
        assert started.end()[0] == 143
        assert alive(ranks) == []


def test_a_stopped_rank_gives_another_the_time_to_save(tmp_path):
    with job(tmp_path, 2, "143", "late") as started:
        assert started.end() == (143, "")
        assert (tmp_path / "late").exists()
        assert started.signals() == {}


def test_a_killed_launcher_leaves_no_rank(tmp_path):
    with job(tmp_path, 3, "stubborn") as started:
        ranks = started.ranks()
        assert len(alive(ranks)) == 3
        started.process.kill()
        _, err = started.end()
        wait_until(lambda: alive(ranks) == [], seconds=5)
    killed = f"The launching process ({started.process.pid}) was killed, and its ranks with it."
    assert err.startswith(killed)
    assert len(err.splitlines()) == 1


AGENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
OF_AGENT = """
import time
from megakit.job.launch import end_with_torchrun
from megakit.reporting.console import Console

end_with_torchrun(Console())
print("begun", flush=True)
time.sleep(2)
print("ended by itself")
"""


@pytest.mark.parametrize("is_torchruns", [True, False])
def test_a_killed_agent_of_torchrun_leaves_no_rank(is_torchruns):
    """Another program that started a rank may end before the rank."""
    told = {"RANK": "3"} | ({"TORCHELASTIC_RUN_ID": "x"} if is_torchruns else {})
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, OF_AGENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=str(REPOSITORY), **told),
    )
    assert agent.stdout is not None
    assert agent.stdout.readline() == "begun\n"
    agent.kill()
    ended = f"Rank 3 ends, as torchrun's agent (process {agent.pid}) has ended.\n"
    told_at_last = ("", ended) if is_torchruns else ("ended by itself\n", "")
    assert agent.communicate(timeout=60) == told_at_last


FORK = """
import os, signal, sys, time
from megakit.job.launch import run_in_fork
from megakit.job.script import begin_script

begin_script()
run_in_fork(lambda: None)  # the next one hears signals all the same

def work():
    def stop(number, frame):
        os.write(1, f"{signal.Signals(number).name}\\n".encode())
        time.sleep(0.3)  # another one, if it comes, is written, too
        sys.exit(7)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    os.write(1, f"{os.getpid()}\\n".encode())
    for _ in range(600):
        time.sleep(0.05)

sys.exit(run_in_fork(work if len(sys.argv) < 2 else lambda: sys.exit(5)))
"""


@contextmanager
def fork(*arguments, **options):
    """A process that works in a fork of its own; yields it and, where the fork waits, its id."""
    process = subprocess.Popen(
        [sys.executable, "-c", FORK, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=str(REPOSITORY)),
        start_new_session=True,
        **options,
    )
    assert process.stdout is not None
    try:
        yield process, None if arguments else int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_fork_receives_signals(number):
    with fork() as (process, _):
        process.send_signal(number)
        assert process.communicate(timeout=60)[0] == f"{number.name}\n"
        assert process.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGCHLD, signal.SIGHUP])
def test_a_fork_where_a_signal_is_ignored_at_the_start(number):
    """Some service managers ignore SIGCHLD, and the kernel then keeps no exit status."""

    def ignore():
        signal.signal(number, signal.SIG_IGN)

    with fork("end", preexec_fn=ignore) as (process, _):
        assert process.wait(timeout=60) == 5
    with fork(preexec_fn=ignore) as (process, child):
        os.killpg(process.pid, number)
        time.sleep(0.3)
        assert is_alive(child)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == "SIGTERM\n"
        assert process.returncode == 7


STATUSES = """
import os, signal, sys
from megakit.job.launch import run_in_fork

print("once", end=" ")
print(*map(run_in_fork, [
    lambda: None,
    lambda: sys.exit(),
    lambda: sys.exit(5),
    lambda: sys.exit("a reason"),
    lambda: print("said by the fork", end=" "),
    lambda: 1 / 0,
    lambda: os.kill(os.getpid(), signal.SIGKILL),
]))
"""


def test_the_end_of_a_fork_is_reported_as_a_shell_does():
    done = subprocess.run(
        [sys.executable, "-c", STATUSES],
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=str(REPOSITORY), PYTHONUNBUFFERED=""),
        timeout=60,
        check=True,
    )
    assert done.stdout == "once said by the fork 0 0 5 1 0 1 137\n"
    assert done.stderr.count("ZeroDivisionError: ") == 1


def test_a_fork_ends_with_its_parent():
    with fork() as (process, child):
        process.kill()
        wait_until(lambda: not is_alive(child), seconds=10)


@pytest.mark.parametrize(("key", "name"), [(b"\x03", "SIGINT"), (b"", "SIGHUP")])
def test_a_terminal_s_signal_reaches_the_fork_once(key, name):
    """Ctrl-C signals both processes, a lost terminal the first one of the session alone."""
    leader, follower = pty.openpty()

    def control():
        fcntl.ioctl(follower, termios.TIOCSCTTY, 0)

    with fork(preexec_fn=control, stdin=follower, pass_fds=[follower]) as (process, _):
        os.close(follower)
        os.write(leader, key)
        if not key:
            os.close(leader)
        assert process.communicate(timeout=60)[0] == f"{name}\n"
        assert process.returncode == 7
