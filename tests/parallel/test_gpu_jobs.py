"""Jobs of several ranks on rehearsed GPUs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.test_starting import TP2, Job, free_port, job, srun_says
from tests.scripts import REPOSITORY, Result, environment, read_json, rehearsed, run, run_script

__all__ = ["job"]  # a fixture

SHORT = ("--dataset", "digits", "--max-steps", "10", "--global-batch-size", "64")


@pytest.mark.long
@pytest.mark.parametrize(
    "visible",
    [1, 2],
    ids=["--gpus-per-task=1", "--gpus-per-node=2"],
)
def test_each_task_uses_its_own_gpu(visible: int, job: Job) -> None:
    """Slurm shows a task its own GPU only, as cuda:0, or all GPUs of the job."""
    port = free_port()
    for task in range(2):
        of_slurm = srun_says(task, port, nodes=1) | {"SLURM_GPUS_ON_NODE": "2"}
        job.begin(*TP2, "--accelerator", "gpu", **rehearsed(visible, **of_slurm))
    assert [end.status for end in job.ends()] == [0, 0]
    assert len(job.metrics()) > 1


def run_in_torchrun(folder: Path, gpu: str) -> Result:
    """Two processes of torchrun, each with one visible GPU."""
    script = f"CUDA_VISIBLE_DEVICES={gpu} exec {sys.executable} {REPOSITORY}/model_pretrain.py $@"
    options = ("--tensor-parallel", 2, "--accelerator", "gpu", "--output-dir", folder / "runs")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    command = (*torchrun, "--no-python", "bash", "-c", script, "bash", *SHORT, *options)
    return run(sys.executable, *command, **rehearsed(2, folder / "report"))


@pytest.mark.long
def test_each_process_of_torchrun_uses_its_own_gpu(tmp_path: Path) -> None:
    run_in_torchrun(tmp_path, "$LOCAL_RANK").output()
    reports = [*map(read_json, (tmp_path / "report").iterdir())]
    assert sorted((report["rank"], report["opened"]) for report in reports) == [(0, [0]), (1, [1])]


@pytest.mark.long
def test_our_launcher_s_processes_do_not_share_a_gpu(tmp_path: Path) -> None:
    options = ("--devices", 2, "--accelerator", "gpu", "--output-dir", tmp_path)
    changes = rehearsed(2, CUDA_VISIBLE_DEVICES="1")
    done = run_script("model_pretrain.py", *SHORT, *options, **changes)
    assert done.status == 2
    assert "--devices 2: this machine has 1 GPU, and each process needs its own" in done.err


KEEPS_THE_GPU_S_GENERATOR = """
import torch
from megakit.runtime import use_accelerator
use_accelerator("gpu")
from megakit.models.layers import seeded

torch.cuda.manual_seed_all(5)
expected = torch.rand(3, device="cuda").cpu()
torch.cuda.manual_seed_all(5)
with seeded(42, "layer"):
    torch.rand(3)
assert torch.equal(torch.rand(3, device="cuda").cpu(), expected)
"""


@pytest.mark.long
def test_initial_weights_leave_the_gpu_s_generator_alone() -> None:
    """A seed of all generators would stay: only the CPU's generator is restored."""
    command = [sys.executable, "-c", KEEPS_THE_GPU_S_GENERATOR]
    subprocess.run(command, env=environment(**rehearsed()), cwd=REPOSITORY, check=True)


PINNED_IN = """
import threading
import torch
from megakit.data.loader import make_loader

pin, threads = torch.Tensor.pin_memory, set()

def pin_memory(tensor):
    if not tensor.is_pinned():
        threads.add(threading.current_thread() is threading.main_thread())
    return pin(tensor)

torch.Tensor.pin_memory = pin_memory
template = torch.utils.data.DataLoader(torch.arange(8).view(4, 2), num_workers=1)
order = [torch.arange(2).numpy(), torch.arange(2, 4).numpy()]
batches = list(make_loader(template, order, device=torch.device("cuda")))
assert [(str(batch.device), batch.tolist()) for batch in batches] == [
    ("cuda:0", [[0, 1], [2, 3]]), ("cuda:0", [[4, 5], [6, 7]])
], batches
assert threads == {False}, threads
"""


@pytest.mark.long
def test_the_batches_of_workers_are_pinned_beside_the_training() -> None:
    command = [sys.executable, "-c", PINNED_IN]
    subprocess.run(command, env=environment(**rehearsed()), cwd=REPOSITORY, check=True)
