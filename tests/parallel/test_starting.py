"""Jobs of several processes, started by the script itself, torchrun, and srun's environment.

Real processes on the bundled digits, and how they end: well, refused, failed, killed, hung.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megakit.checkpoints.folders import list_checkpoints
from tests.faults.harness import BEFORE_STEP, HOOK, MARK, Fault, leftover_processes
from tests.scripts import REPOSITORY, environment, read_csv, run_script

DIGITS = ("--dataset", "digits", "--accelerator", "cpu", "--precision", 32)
SHORT = (*DIGITS, "--max-steps", 6, "--val-interval", 3, "--save-interval", 3)
TP2 = ("--tensor-parallel", 2)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")
#: With a free port, not torchrun's default, at which another suite on this machine may be.
STANDALONE = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
#: Runs a script that gives its other ranks 2 s to end after one has failed, and not 10 s.
IMPATIENT = (
    "-c",
    "import runpy, sys; from megakit.job import launch; launch.GRACE = 4.0; del sys.argv[0]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')",
)
#: What a job may take on a busy machine; each takes some ten seconds on a quiet one.
PATIENCE = 300


@dataclass(frozen=True)
class End:
    status: int
    out: str
    err: str


class Job:
    """Processes of one job, whoever starts them, all with the same output folder."""

    def __init__(self, folder: Path):
        self.runs = folder / "runs"
        self.mark = uuid.uuid4().hex
        self.processes: list[subprocess.Popen[str]] = []

    def begin(self, *arguments, starter=(), fault=None, **changes):
        changes[MARK] = self.mark
        if fault is not None:
            moment = f"{fault.place}:{fault.count} {fault.name} {fault.rank}"
            changes |= {"FAULT": moment, "PYTHONPATH": f"{HOOK}:{REPOSITORY}"}
        script = REPOSITORY / "model_pretrain.py"
        command = [*starter, script, *arguments, "--output-dir", self.runs]
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**changes),
        )
        self.processes.append(process)
        return process

    def ends(self):
        """How the processes ended that were started here; none that they started may remain."""
        ends = []
        for process in self.processes:
            out, err = process.communicate(timeout=PATIENCE)
            ends.append(End(process.returncode, out, err))
        assert leftover_processes(self.mark, patience=30) == []
        return ends

    def end(self):
        (end,) = self.ends()
        return end

    def metrics(self):
        rows = read_csv(self.runs / "pretrain" / "metrics.csv")
        return [{name: float(value or 0) for name, value in row.items()} for row in rows]

    def wait_for_checkpoint(self):
        deadline = time.monotonic() + PATIENCE
        while not list_checkpoints(self.runs / "pretrain" / "checkpoints"):
            assert [process.poll() for process in self.processes] == [None] * len(self.processes)
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def tidy(self):
        for process in self.processes:
            process.kill()
        for line in leftover_processes(self.mark, patience=2):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        for process in self.processes:
            process.communicate()


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.tidy()


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory):
    """The job that `--devices 2` starts: its result, and what it says."""
    job = Job(tmp_path_factory.mktemp("by-itself"))
    job.begin(*SHORT, *TP2, "--devices", 2)
    end = job.end()
    assert end.status == 0, end.err
    return job.metrics(), lines(end, job)


def lines(end, job):
    """What a job says, without the lines that times are in."""
    text = end.err.replace(str(job.runs), "RUNS")
    timed = ("steps/s", "  speed  ", "  time  ", ", checkpoints ")
    return [line for line in text.splitlines() if line and not any(part in line for part in timed)]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun_says(rank, port):
    return {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    }


def srun_says(rank, port, nodes=2, tasks=2):
    return {
        # Another suite on this machine has other jobs.
        **{"SLURM_JOB_ID": port, "SLURM_JOB_NAME": "megakit", "SLURM_STEP_ID": "0"},
        **{"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(tasks), "SLURM_NNODES": str(nodes)},
        **{"SLURM_LOCALID": str(rank // nodes), "SLURM_NODEID": str(rank % nodes)},
        **{"SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_PORT": port},
    }


def start(job, starter, port):
    """Starts the same job in another way; the process whose rank is 0 comes first."""
    if starter == "torchrun":
        job.begin(*SHORT, *TP2, starter=(*TORCHRUN, 2, "--master-port", port))
    elif starter == "two machines":
        for node in (0, 1):
            place = ("--nnodes", 2, "--node-rank", node, "--master-addr", "127.0.0.1")
            job.begin(*SHORT, *TP2, starter=(*TORCHRUN, 1, *place, "--master-port", port))
    else:
        for rank in (0, 1):
            says = srun_says(rank, port)
            del says["MASTER_PORT"]
            job.begin(*SHORT, *TP2, **says)


@pytest.mark.parametrize(
    "starter", [pytest.param("torchrun", marks=pytest.mark.long), "two machines", "srun"]
)
def test_the_same_job_whoever_starts_it(job, by_itself, starter):
    port = free_port()
    # Another program has the port that the number of a SLURM job gives; its ranks take the next.
    with socket.create_server(("", 15_000 + int(port) % 10_000)):
        start(job, starter, port)
        first, *others = job.ends()
    assert first.status == 0, first.err
    assert first.out == f"{job.runs}/pretrain/checkpoints/step=000006\n"
    metrics, said = by_itself
    assert "2 processes: tensor 2 x pipeline 1 x data 1" in said[0]
    # torchrun has something to say itself
    assert [line for line in lines(first, job) if line in said] == said
    for end in others:
        assert (end.status, end.out) == (0, ""), end.err
        assert not set(lines(end, job)) & set(said)
    for ours, theirs in zip(job.metrics(), metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "says", "places"),
        [("torchrun", torchrun_says, (2, 1)), ("srun", srun_says, (1, 2))],
    )
    def test_by_one_rank_with_the_arithmetic(self, job, name, says, places):
        """What the starter decided, against options that say otherwise; all ranks end with 2."""
        port = free_port()
        for rank in (0, 1):
            options = ("--devices", 6, "--num-nodes", 5, "--tensor-parallel", 3)
            job.begin(*SHORT, *options, **says(rank, port))
        first, second = job.ends()
        assert (first.status, second.status) == (2, 2), first.err
        assert second.err == first.out == second.out == ""
        devices, nodes, width, *_ = first.err.splitlines()
        assert f"--devices 6: {name} started this job with {places[0]}." in devices
        assert f"--num-nodes 5: {name} started this job with {places[1]}." in nodes
        assert "--tensor-parallel 3: has to divide the width of the split layers, 64." in width
        assert "Traceback" not in first.err
        assert not job.runs.exists()


class TestFailures:
    @pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
    def test_the_failing_rank_s_traceback_and_no_other(self, job, rank):
        fault = Fault(BEFORE_STEP, 3, name="ZeroDivisionError", rank=rank)
        job.begin(*SHORT, *TP2, "--devices", 2, fault=fault)
        end = job.end()
        assert end.status == 1
        assert end.out == ""
        assert end.err.count("Traceback (most recent call last)") == 1, end.err
        assert "ZeroDivisionError: made to fail here" in end.err
        assert end.err.count(" failed; the log is ") == 1
        assert f"model_pretrain.py (rank {rank}) failed; the log is {job.runs}" in end.err

    def test_a_system_error_before_the_first_save(self, job):
        """One line for people, its traceback in the log, and no word of a checkpoint."""
        job.begin(*SHORT, fault=Fault(BEFORE_STEP, 3, name="FileNotFoundError"))
        end = job.end()
        assert end.status == 1
        assert "untouched" not in end.err
        assert "Traceback" not in end.err
        (log,) = job.runs.glob("*/log.txt")
        assert "FileNotFoundError: made to fail here" in log.read_text()

    @pytest.mark.long
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_hung_rank(self, job, rank):
        """It answers nobody, not even SIGTERM; the other's wait ends, and so does the job."""
        fault = Fault(BEFORE_STEP, 3, name="SIGSTOP", rank=rank)
        options = (*TP2, "--devices", 2, "--timeout", 10)
        job.begin(*SHORT, *options, starter=IMPATIENT, fault=fault)
        end = job.end()
        assert end.status == 1
        assert end.err.count("Traceback (most recent call last)") == 1, end.err
        assert f"model_pretrain.py (rank {1 - rank}) failed" in end.err
        assert "Timed out waiting 10000ms" in end.err

    @pytest.mark.long
    @pytest.mark.parametrize("rank", [1, 0])
    def test_a_killed_rank_under_torchrun(self, job, rank):
        """torchrun names it, in a traceback of its own; jobs without it are in tests/faults."""
        fault = Fault(BEFORE_STEP, 3, rank=rank)
        job.begin(*SHORT, *TP2, starter=(*STANDALONE, 2), fault=fault)
        end = job.end()
        assert end.status == 1
        assert f"(exitcode: -9) local_rank: {rank}" in end.err
        assert end.err.count("Traceback (most recent call last)") == 1, end.err


class TestSlurm:
    def test_a_rank_that_does_not_come(self, job):
        """Two jobs, each with but one of its two ranks; `--timeout` ends their waiting."""
        for rank in (0, 1):
            job.begin(*SHORT, "--timeout", 1, **srun_says(rank, free_port()))
        first, second = job.ends()
        assert (first.status, second.status) == (1, 1)
        assert (
            "srun starts 2 processes, but rank 1 did not connect within 1 s (--timeout)"
            in first.err
        )
        assert "model_pretrain.py (rank 1): No rank 0 at 127.0.0.1, port " in second.err
        assert "within 1 s (--timeout)" in second.err
        assert [len(end.err.splitlines()) for end in (first, second)] == [1, 1]

    def test_an_impossible_time_out_reaches_all_ranks(self, job):
        """The second rank waited for a hundred million years."""
        for rank, port in zip((0, 1), [free_port()] * 2, strict=True):
            job.begin(*SHORT, "--timeout", 10**16, **srun_says(rank, port))
        ends = job.ends()
        assert [end.status for end in ends] == [2, 2]
        (line,) = [line for end in ends for line in end.err.splitlines()]
        assert "--timeout 10000000000000000: has to be at most 604,800" in line

    def test_another_program_at_the_user_s_port(self, job):
        with socket.create_server(("", 0)) as server:
            for rank in (0, 1):
                says = srun_says(rank, str(server.getsockname()[1]))
                job.begin(*SHORT, "--timeout", 1, **says)
            first, second = job.ends()
        assert (first.status, second.status) == (2, 1)
        assert "rank 0 cannot listen at it (another program listens there)" in first.err
        assert "model_pretrain.py: MASTER_PORT " in first.err
        assert "model_pretrain.py (rank 1): No rank 0 at 127.0.0.1, port " in second.err
        assert [len(end.err.splitlines()) for end in (first, second)] == [1, 1]

    @pytest.mark.parametrize("tasks", [1, pytest.param(2, marks=pytest.mark.long)])
    def test_the_time_limit_s_signal_saves(self, job, tasks):
        """Lightning would requeue the job by itself, and lose what was done since the last save."""
        port = free_port()
        for rank in range(tasks):
            says = srun_says(rank, port, nodes=1, tasks=tasks)
            job.begin(*SHORT, "--max-steps", 100_000, "--save-interval", 3, **says)
        job.wait_for_checkpoint()
        for process in job.processes:
            process.send_signal(signal.SIGUSR1)
        first, *others = job.ends()
        assert [end.status for end in (first, *others)] == [143] * tasks, first.err
        (step,) = [line.split()[3].strip(";") for line in first.err.splitlines() if "after" in line]
        newest = list_checkpoints(job.runs / "pretrain" / "checkpoints")[-1]
        assert newest.name == f"step={int(step):06}"


@pytest.mark.long
def test_torchrun_then_alone_then_both_ways_of_predicting(job):
    """One checkpoint, predicted by one process or two: the same digits."""
    common = (*DIGITS, "--output-dir", job.runs)
    training = ("--max-steps", 200, "--val-interval", 100, "--save-interval", 100)
    job.begin(*DIGITS, *training, *TP2, starter=(*STANDALONE, 2))
    assert job.end().status == 0
    assert run_script("model_finetune.py", *common, *training).status == 0
    found = []
    for layout in (("--devices", 2, "--pipeline-parallel", 2), ()):
        result = run_script("model_predict.py", *common, *layout)
        assert result.status == 0, result.err
        rows = read_csv(Path(result.out.strip()))
        probabilities = [[float(row[f"p{k}"]) for k in range(10)] for row in rows]
        found.append(([row["prediction"] for row in rows], np.array(probabilities)))
    (two, two_probabilities), (one, one_probabilities) = found
    assert two == one
    assert np.abs(two_probabilities - one_probabilities).max() <= 1e-4
