"""Jobs of several ranks on rehearsed GPUs."""

import sys
from pathlib import Path

import pytest

from tests.parallel.test_starting import TP2, Job, free_port, job, srun_says
from tests.scripts import (
    REPOSITORY,
    output_of,
    read_csv,
    read_json,
    rehearsed,
    run,
    run_python,
    run_script,
)

__all__ = ["job"]  # a fixture

pytestmark = pytest.mark.long

SHORT = ("--dataset", "digits", "--max-steps", "10", "--global-batch-size", "64")


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
    assert len(read_csv(job.path / "metrics.csv")) > 1


def reported(folder: Path) -> list[tuple[int, list[int]]]:
    """The rank of each process that has opened a GPU, and which ones; from their reports."""
    reports = [*map(read_json, folder.glob("*.json"))]  # others are half written
    return sorted((report["rank"], report["opened"]) for report in reports)


def test_each_process_of_torchrun_uses_its_own_gpu(tmp_path: Path) -> None:
    """Each sees but one."""
    options = ("--tensor-parallel", 2, "--accelerator", "gpu", "--output-dir", tmp_path / "runs")
    script = f"CUDA_VISIBLE_DEVICES=$LOCAL_RANK exec {sys.executable} model_pretrain.py $@"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    command = (*torchrun, "--no-python", "bash", "-c", script, "bash", *SHORT, *options)
    changes = rehearsed(2, tmp_path / "report")
    run(sys.executable, *command, cwd=REPOSITORY, **changes).output()
    assert reported(tmp_path / "report") == [(0, [0]), (1, [1])]


def test_our_launcher_s_processes_do_not_share_a_gpu(tmp_path: Path) -> None:
    options = ("--devices", 2, "--accelerator", "gpu", "--output-dir", tmp_path)
    changes = rehearsed(2, CUDA_VISIBLE_DEVICES="1")
    done = run_script("model_pretrain.py", *SHORT, *options, **changes)
    assert done.status == 2
    assert "--devices 2: this machine has 1 GPU, and each process needs its own" in done.err


RANKS = """
from megakit.testing import Ranks, distributed_model_parallel_state

def sum_of_ranks():
    import torch

    with distributed_model_parallel_state(accelerator="gpu", backend="gloo"):
        total = torch.tensor(torch.distributed.get_rank() + 1, device="cuda")
        torch.distributed.all_reduce(total)
        return int(total), torch.get_float32_matmul_precision()

if __name__ == "__main__":
    with Ranks(2, accelerator="gpu", timeout=200) as pool:
        print(*pool.run(sum_of_ranks))
"""


def test_ranks_of_a_pool_open_their_own(tmp_path: Path) -> None:
    """None computes in TF32, as NVIDIA's images do."""
    (tmp_path / "job.py").write_text(RANKS)
    changes = rehearsed(2, tmp_path / "report", TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1")
    told = run_python(tmp_path / "job.py", **changes).output()
    assert told == "(3, 'highest') (3, 'highest')\n"
    assert [opened for _, opened in reported(tmp_path / "report")] == [[0], [1]]


#: By what they show; a seed of all generators would stay, because only the CPU's is restored.
SNIPPETS = {
    "initial weights leave the GPU's generator alone": """
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
""",
    "the batches of workers are pinned beside the training": """
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
""",
}


@pytest.mark.parametrize("name", SNIPPETS)
def test_in_one_process(name: str) -> None:
    output_of(SNIPPETS[name], **rehearsed())
