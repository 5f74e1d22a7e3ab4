"""Jobs of several processes, started by the script itself, torchrun, and srun's environment.

Real processes on the bundled digits, and how they end: well, refused, failed, killed, hung.
"""

import os
import signal
import socket
import subprocess

import pytest

from megakit.checkpoints.manifest import list_checkpoints
from tests.faults.harness import BEFORE_STEP, Fault, Training, leftover_processes
from tests.scripts import REPOSITORY, Result

SHORT = (
    *("--accelerator", "cpu", "--precision", 32),
    *("--max-steps", 6, "--val-interval", 3, "--save-interval", 3),
)
TP2 = ("--tensor-parallel", 2)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")
#: Runs a script that gives its other ranks 2 s to end after one has failed, and not 10 s.
IMPATIENT = (
    "-c",
    "import runpy, sys; from megakit.job import launch; launch.GRACE = 4.0; del sys.argv[0]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')",
)
#: Runs a script whose ranks wait 1 s for a name or a file, on a machine that calls itself so.
HASTY = (
    "-c",
    "import runpy, socket, sys; from megakit.job import cluster; cluster.PATIENCE = 4; "
    "name = sys.argv[1]; socket.gethostname = lambda: name; del sys.argv[:2]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')",
)
#: What a job may take on a busy machine; each takes some ten seconds on a quiet one.
PATIENCE = 300


class Job(Training):
    """Processes of one job, whoever starts them, all with the same output folder."""

    def __init__(self, folder):
        super().__init__(folder, options=SHORT)
        self.processes: list[subprocess.Popen[str]] = []

    def begin(self, *options, fault=None, **changes):
        self.processes.append(self.process(fault, *options, **changes))

    def ends(self):
        """How the processes ended that were started here; none that they started may remain."""
        ends = []
        for process in self.processes:
            out, err = process.communicate(timeout=PATIENCE)
            ends.append(Result(process.returncode, out, err))
        assert leftover_processes(self.mark, patience=30) == []
        return ends


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "runs")
    yield job
    for process in job.processes:
        process.kill()
        process.communicate()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def srun_says(rank, port, nodes=2):
    return {
        # Another suite on this machine has other jobs.
        **{"SLURM_JOB_ID": port, "SLURM_JOB_NAME": "megakit", "SLURM_STEP_ID": "0"},
        **{"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"},
        **{"SLURM_LOCALID": str(rank // nodes), "SLURM_NODEID": str(rank % nodes)},
        **{"SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NODELIST": "127.0.0.1"},
        "MASTER_PORT": port,
    }


@pytest.mark.long
@pytest.mark.parametrize("starter", ["srun", "torchrun on two machines"])
def test_a_good_end(job, starter):
    """The port of srun's jobs follows from the job's number."""
    port = free_port()
    for rank in (0, 1):
        if starter == "srun":
            job.begin(*TP2, **srun_says(rank, port) | {"MASTER_PORT": None})
        else:
            place = ("--nnodes", 2, "--node-rank", rank, "--master-addr", "127.0.0.1")
            job.begin(*TP2, starter=(*TORCHRUN, 1, *place, "--master-port", port))
    first, other = job.ends()
    assert first.status == 0, first.err
    assert first.out == f"{job.checkpoints}/step=000006\n"
    assert "2 processes: tensor 2 x pipeline 1 x data 1" in first.err
    # Otherwise Megatron warns that communication does not overlap with computation on a GPU.
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in (job.path / "log.txt").read_text()
    assert (other.status, other.out) == (0, ""), other.err
    assert "step=000006" not in other.err


def test_refused_by_one_rank_with_the_arithmetic(job):
    """What the starter decided, against options that say otherwise; all ranks end with 2."""
    port = free_port()
    for rank in (0, 1):
        options = ("--devices", 6, "--num-nodes", 5, "--tensor-parallel", 3)
        job.begin(*options, **srun_says(rank, port))
    first, second = job.ends()
    assert (first.status, second.status) == (2, 2), first.err
    assert second.err == first.out == second.out == ""
    devices, nodes, width, *_ = first.err.splitlines()
    assert "--devices 6: srun started this job with 1." in devices
    assert "--num-nodes 5: srun started this job with 2." in nodes
    assert "--tensor-parallel 3: has to divide the width of the split layers, 64." in width
    assert "Traceback" not in first.err
    assert not job.folder.exists()


def test_a_port_that_another_program_uses(job):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        job.begin(**srun_says(0, port) | {"MASTER_ADDR": "127.0.0.1"})
        (end,) = job.ends()
    assert (end.status, len(end.err.splitlines())) == (2, 1)
    assert f"MASTER_ADDR 127.0.0.1 (127.0.0.1), MASTER_PORT {port}: Address already in u" in end.err
    assert "Give all ranks another MASTER_PORT" in end.err
    assert not job.folder.exists()


def test_an_address_that_does_not_exist(job):
    for rank in (0, 1):
        place = srun_says(rank, free_port()) | {"MASTER_ADDR": "nowhere.invalid"}
        job.begin(starter=(*HASTY, "here"), **place)
    for end in job.ends():
        assert (end.status, len(end.err.splitlines())) == (2, 1), end.err
        assert "MASTER_ADDR nowhere.invalid: here finds no machine of this name (" in end.err
    assert not job.folder.exists()


@pytest.mark.parametrize(
    ("address", "folders", "options", "told"),
    [
        pytest.param(
            *("127.0.0.1", "aa", ("--hidden-size", 32)),
            "--hidden-size: 64 on rank 0, 32 on localhost. Start all ranks with the same options.",
            marks=pytest.mark.long,
        ),
        ("127.0.0.1", "ab", (), "b/runs/pretrain on localhost is not the folder of rank 0. --outp"),
        # Two ranks on one machine that, as two machines do, meet at an address of the network.
        pytest.param(
            *("0.0.0.0", "aa", (), "localhost resolves its own name to 127.0.0.1, where other"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["options", "folder", "name"],
)
def test_machines_that_cannot_work_together(job, tmp_path, address, folders, options, told):
    """One rank says so, and both end before any work."""
    port = free_port()
    for rank, folder in enumerate(folders):
        (place := tmp_path / folder).mkdir(exist_ok=True)
        (place / "run").touch()  # so the output folder stays relative: each rank has its own
        job.begin(
            *("--output-dir", "runs", *(options if rank else ())),
            starter=(*HASTY, "localhost"),
            before=lambda place=place: os.chdir(place),
            **srun_says(rank, port) | {"MASTER_ADDR": address, "PYTHONPATH": str(REPOSITORY)},
        )
    ends = job.ends()
    assert [end.status for end in ends] == [2, 2], ends
    (line,) = "".join(end.err for end in ends).splitlines()
    assert told in line
    assert not list(tmp_path.rglob("log.txt"))


def test_the_port_of_another_job(job):
    """A rank whose job's rank 0 could not have the port finds the other job there."""
    port = free_port()
    job.begin(**srun_says(0, port))
    job.begin(**srun_says(1, port) | {"SLURM_JOB_ID": str(int(port) + 1009)})
    first, other = job.processes
    _, err = other.communicate(timeout=PATIENCE)
    assert (other.returncode, len(err.splitlines())) == (2, 1), err
    assert f"MASTER_PORT {port}: ranks of another job meet here" in err
    assert first.poll() is None


@pytest.mark.long
def test_a_rank_that_hangs_in_the_start(job):
    """Its other rank waits for `--timeout`, and says so in a sentence."""
    port = free_port()
    fault = Fault("megakit.nemo.strategy:ExactStrategy.setup_distributed", name="SIGSTOP")
    for rank in (0, 1):
        job.begin("--timeout", 10, fault=fault if rank else None, **srun_says(rank, port))
    first, _ = job.processes
    _, err = first.communicate(timeout=PATIENCE)
    assert first.returncode == 1
    (line,) = [line for line in err.splitlines() if line.startswith("model_pretrain.py")]
    assert "(rank 0): the ranks could not connect to each other within --timeout" in line
    assert "Traceback" not in err


@pytest.mark.long
def test_the_failing_rank_s_traceback_and_no_other(job):
    fault = Fault(BEFORE_STEP, 3, name="ZeroDivisionError", rank=1)
    job.begin(*TP2, "--devices", 2, fault=fault)
    (end,) = job.ends()
    assert (end.status, end.out) == (1, "")
    assert end.err.count("Traceback (most recent call last)") == 1, end.err
    assert "ZeroDivisionError: made to fail here" in end.err
    assert end.err.count(" failed; the log is ") == 1
    assert f"model_pretrain.py (rank 1) failed; the log is {job.folder}" in end.err


@pytest.mark.long
def test_a_hung_rank(job):
    """It answers nobody, not even SIGTERM; the other's wait ends, and so does the job."""
    fault = Fault(BEFORE_STEP, 3, name="SIGSTOP", rank=1)
    options = (*TP2, "--devices", 2, "--timeout", 30)
    job.begin(*options, starter=IMPATIENT, fault=fault)
    (end,) = job.ends()
    assert end.status == 1
    assert end.err.count("Traceback (most recent call last)") == 1, end.err
    assert "model_pretrain.py (rank 0) failed" in end.err
    assert "Timed out waiting 30000ms" in end.err


@pytest.mark.long
def test_a_rank_that_does_not_come(job):
    """Two jobs, each with but one of its two ranks; `--timeout` ends their waiting."""
    for rank in (0, 1):
        job.begin("--timeout", 1, **srun_says(rank, free_port()))
    first, second = job.ends()
    assert (first.status, second.status) == (1, 1)
    told = "srun started 2 processes, but rank {} did not answer within 1 s (--timeout) at MASTER_"
    assert f"model_pretrain.py (rank 0): {told.format(1)}" in first.err
    assert f"model_pretrain.py (rank 1): {told.format(0)}" in second.err
    assert [len(end.err.splitlines()) for end in (first, second)] == [1, 1]


@pytest.mark.long
def test_the_time_limit_s_signal_saves(job):
    """Lightning would requeue the job by itself, and lose what was done since the last save."""
    port = free_port()
    for rank in range(2):
        job.begin("--max-steps", 100_000, **srun_says(rank, port, nodes=1))
    job.wait_for_steps(job.processes[0])
    for process in job.processes:
        process.send_signal(signal.SIGUSR1)
    first, second = job.ends()
    assert (first.status, second.status) == (143, 143), first.err
    (step,) = [line.split()[3].strip(";") for line in first.err.splitlines() if "after" in line]
    assert list_checkpoints(job.checkpoints)[-1].name == f"step={int(step):06}"
