"""Jobs of several ranks on rehearsed GPUs."""

import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts import (
    REPOSITORY,
    Result,
    environment,
    read_csv,
    read_json,
    rehearsed,
    run,
    run_script,
)

SHORT = ("--dataset", "digits", "--max-steps", "10", "--global-batch-size", "64")


@contextlib.contextmanager
def two_tasks_of_srun(
    runs: Path, visible: int, on_machine: int, *arguments: object
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts a pretraining with srun's variables: each task sees `visible` of the job's GPUs."""
    common = {
        **{"SLURM_JOB_ID": str(random.randrange(10**6)), "SLURM_JOB_NAME": "test"},
        **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"},
        **{"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_GPUS_ON_NODE": str(on_machine)},
        **{"SLURM_STEP_ID": "0", "SLURM_NODEID": "0"},
    }
    command = [sys.executable, REPOSITORY / "model_pretrain.py", *SHORT, *arguments]
    command += ["--accelerator", "gpu", "--output-dir", runs]
    tasks = [
        subprocess.Popen(
            [*map(str, command)],
            env=environment(
                **rehearsed(visible, **common, SLURM_PROCID=str(task), SLURM_LOCALID=str(task))
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in range(2)
    ]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.kill()
            task.communicate()


def ends(tasks: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Waits for the tasks: their statuses, and what they wrote to standard error."""
    messages = [task.communicate(timeout=240)[1] for task in tasks]
    return [task.returncode for task in tasks], messages


@pytest.mark.long
@pytest.mark.parametrize(
    "visible",
    [1, 2],
    ids=["--gpus-per-task=1", "--gpus-per-node=2"],
)
def test_each_task_uses_its_own_gpu(visible: int, tmp_path: Path) -> None:
    """Slurm shows a task its own GPU only, as cuda:0, or all GPUs of the job."""
    with two_tasks_of_srun(tmp_path, visible, 2, "--tensor-parallel", 2) as tasks:
        statuses, messages = ends(tasks)
    assert statuses == [0, 0], messages
    assert len(read_csv(tmp_path / "pretrain" / "metrics.csv")) > 1


@pytest.mark.long
def test_two_tasks_do_not_share_a_gpu(tmp_path: Path) -> None:
    with two_tasks_of_srun(tmp_path, 1, 1) as tasks:
        statuses, (first, _) = ends(tasks)
    assert statuses == [2, 2]
    assert "--devices 2: this machine has 1 GPU, and each process needs its own" in first


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
def test_processes_of_torchrun_do_not_share_a_gpu(tmp_path: Path) -> None:
    done = run_in_torchrun(tmp_path, "1")
    assert done.status == 1
    assert "): CUDA_VISIBLE_DEVICES=1: another process of this machine has the same" in done.err


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
