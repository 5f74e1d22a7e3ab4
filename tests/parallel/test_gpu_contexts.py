"""Which process opens which GPU: a context costs memory, and an exclusive GPU has only one."""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.scripts import (
    REPOSITORY,
    environment,
    output_of,
    read_json,
    rehearsed,
    run,
    run_python,
)
from tests.test_conftest import pytest_in


def opened(folder: Path) -> dict[int, set[int]]:
    """The GPUs that each process has opened, by its id; the folder has the processes' reports."""
    found = defaultdict(set)
    for report in folder.glob("*.json"):
        for line in read_json(report)["opened"]:
            found[int(report.stem)].add(int(line.split()[1]))
    return dict(found)


@pytest.mark.long
def test_a_launcher_opens_none_and_each_rank_its_own(tmp_path: Path) -> None:
    options = ("--dataset", "digits", "--accelerator", "gpu", "--devices", "2", "--max-steps", "1")
    changes = rehearsed(2, report=tmp_path)
    launcher = subprocess.Popen(
        [sys.executable, REPOSITORY / "model_pretrain.py", *options, "--output-dir", tmp_path],
        env=environment(**changes),
    )
    assert launcher.wait(timeout=200) == 0
    found = opened(tmp_path)
    assert launcher.pid not in found
    # Before the ranks, a process of its own has checked the first GPU.
    assert sorted(found.values(), key=list) == [{0}, {0}, {1}]


RANKS = """
from megakit.testing import Ranks, distributed_model_parallel_state

def sum_of_ranks():
    import torch

    with distributed_model_parallel_state(accelerator="gpu", backend="gloo"):
        total = torch.tensor(torch.distributed.get_rank() + 1, device="cuda")
        torch.distributed.all_reduce(total)
        return int(total), torch.get_float32_matmul_precision()

if __name__ == "__main__":
    with Ranks(2, accelerator="gpu") as pool:
        print(*pool.run(sum_of_ranks))
"""


@pytest.mark.long
@pytest.mark.parametrize(("gpus", "expected"), [(2, [{0}, {1}]), (1, [{0}, {0}])])
def test_ranks_of_a_pool_open_their_own(
    tmp_path: Path, gpus: int, expected: list[set[int]]
) -> None:
    """Also where each process sees a single GPU. None computes in TF32, as NVIDIA's images do."""
    (tmp_path / "job.py").write_text(RANKS)
    image = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    changes = rehearsed(gpus, report=tmp_path, **image)
    told = run_python(tmp_path / "job.py", **changes).output()
    assert told == "(3, 'highest') (3, 'highest')\n"
    assert sorted(opened(tmp_path).values(), key=list) == expected


@pytest.mark.parametrize("in_child", [False, True])
def test_a_process_that_computes_checks_its_gpu_itself(tmp_path: Path, in_child: bool) -> None:
    """A child would import torch once more; a process that does not compute needs no torch."""
    told = output_of(
        "import os, sys\n"
        "from megakit.runtime import find_accelerator\n"
        f"found = find_accelerator('gpu', 'bf16-mixed', in_child={in_child})\n"
        "print(os.getpid(), found.count, 'torch' in sys.modules)",
        **rehearsed(3, report=tmp_path, LOCAL_RANK="1"),
    )
    process, count, has_torch = told.split()
    assert (count, has_torch) == ("3", str(not in_child))
    found = opened(tmp_path)
    assert list(found.values()) == [{1}]
    assert (int(process) in found) == (not in_child)


MARKED = """
import os
import pytest

def test_of_a_cpu():
    from megakit.runtime import cpu

    cpu.patch_torch()

@pytest.mark.gpu
def test_of_a_gpu():
    print(f"<{os.getpid()}>")
"""


@pytest.mark.long
def test_tests_of_a_gpu_run_after_those_of_a_cpu(tmp_path: Path) -> None:
    """And pytest itself opens no GPU, since it would keep it."""
    changes = rehearsed(1, report=tmp_path)
    told = pytest_in(tmp_path, MARKED, status=0, **changes)
    assert "2 passed" in told
    pytest_itself = int(told.partition("<")[2].partition(">")[0])
    assert pytest_itself not in opened(tmp_path)


# Notes what the check starts, and starts only what finds the GPUs.
PYTHON = """#!/usr/bin/env bash
[[ $1 != -c ]] || exec "$REAL_PYTHON" "$@"
echo "${FAULT:+$PYTHONPATH }$*" >> "$LOG"
"""


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_gpu_check_counts_as_the_scripts_do(tmp_path: Path, gpus: int) -> None:
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(PYTHON)
    python.chmod(0o755)
    own = {"PYTHON": str(python), "REAL_PYTHON": sys.executable, "LOG": str(log)}
    changes = rehearsed(gpus, **own)
    done = run(REPOSITORY / "benchmarks" / "gpu_check.sh", **changes)
    assert done.status == 1  # no signal came, so the resumption has failed
    assert f"{gpus} GPU(s)" in done.out
    started = log.read_text().splitlines()
    assert sum("--devices 2" in line for line in started) == (3 if gpus == 2 else 0)
    assert any(
        line.startswith(f"tests/faults/hook:{changes['PYTHONPATH']} model_pretrain.py")
        for line in started
    )
