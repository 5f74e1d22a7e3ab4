"""Which process opens which GPU: a context costs half a GB of its memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import REPOSITORY, environment, output_of, read_json, rehearsed, run_python


def opened(folder: Path) -> dict[int, set[int]]:
    """The GPUs that each process has opened, by its id; the folder has the processes' reports."""
    return {int(one.stem): {*read_json(one)["opened"]} for one in folder.glob("*.json")}


@pytest.mark.long
def test_each_rank_opens_its_own_and_the_launcher_none(tmp_path: Path) -> None:
    options = ("--dataset", "digits", "--accelerator", "gpu", "--devices", "2", "--max-steps", "1")
    changes = rehearsed(2, report=tmp_path)
    launcher = subprocess.Popen(
        [sys.executable, REPOSITORY / "model_pretrain.py", *options, "--output-dir", tmp_path],
        env=environment(**changes),
    )
    assert launcher.wait(timeout=200) == 0
    found = opened(tmp_path)
    assert launcher.pid not in found
    assert sorted(found.values(), key=list) == [{0}, {1}]


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


@pytest.mark.long
def test_ranks_of_a_pool_open_their_own(tmp_path: Path) -> None:
    """None computes in TF32, as NVIDIA's images do."""
    (tmp_path / "job.py").write_text(RANKS)
    image = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    changes = rehearsed(2, report=tmp_path, **image)
    told = run_python(tmp_path / "job.py", **changes).output()
    assert told == "(3, 'highest') (3, 'highest')\n"
    assert sorted(opened(tmp_path).values(), key=list) == [{0}, {1}]


@pytest.mark.long
def test_a_process_that_computes_checks_its_own_gpu(tmp_path: Path) -> None:
    told = output_of(
        "from megakit.runtime import find_accelerator\n"
        "print(find_accelerator('gpu', 'bf16-mixed').count)",
        **rehearsed(3, report=tmp_path, LOCAL_RANK="1"),
    )
    assert told == "3\n"
    assert list(opened(tmp_path).values()) == [{1}]
