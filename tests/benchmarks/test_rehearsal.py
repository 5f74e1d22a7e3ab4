"""Benchmarks of a GPU, with few steps on rehearsed ones, and the tables that they print."""

import argparse
import re
import sys
from pathlib import Path

import pytest

from tests.benchmarks.conftest import BENCHMARKS
from tests.scripts import rehearsed, run

DIGITS = {"dataset": "digits", "data_dir": Path("no-data")}


def test_a_row_has_medians_and_means(benchmark):
    steps = [{"kernels": 50, "copies": 2, "bytes": 4_000_000, "synchronizations": 3}]
    steps += [{"kernels": 57, "synchronizations": 1}] * 3
    assert benchmark("rehearsal").row("it", steps) == "| it | 57 | 1 | 1.50 | 0.50 | 1.000 |"


def test_a_plain_loop_waits_only_where_it_logs(benchmark):
    sizes = {"steps": 25, "warm_up": 5, "batch_size": 32, "device": "gpu"}
    told = benchmark("steps").train("torch", 1, **DIGITS, **sizes, count=True)
    waits = [step.get("synchronizations", 0) for step in told["counts"]]
    assert waits == ([0] * 4 + [1] + [0] * 5) * 2
    assert {step["copies"] for step in told["counts"]} == {1}
    assert {step["bytes"] for step in told["counts"]} == {32 * 784}
    # A cast of each of the 8 weights to bfloat16, and back for its gradient, is among them.
    assert {step["kernels"] for step in told["counts"]} == {56}


@pytest.mark.long
def test_plain_lightning_waits_as_seldom(benchmark):
    sizes = {"steps": 25, "warm_up": 5, "batch_size": 32, "device": "gpu"}
    told = benchmark("steps").train("lightning", 1, **DIGITS, **sizes, count=True)
    assert sum(step.get("synchronizations", 0) for step in told["counts"]) == 2


@pytest.mark.long
def test_the_rehearsed_script_is_counted_and_computes_as_a_cpu(benchmark, tmp_path):
    rehearsal = benchmark("rehearsal")
    options = argparse.Namespace(**DIGITS, steps=10)
    (row,) = rehearsal.script_rows(rehearsal.CASES[0], options, tmp_path / "gpu")
    assert re.fullmatch(r"\| pretrain \| \d\d \| 1 \| 1\.10 \| 0\.\d\d \| 0\.\d{3} \|", row)
    found = rehearsal.comparison(options, tmp_path / "gpu" / "runs", tmp_path / "cpu")
    assert "equals, byte for byte" in found
    metrics = tmp_path / "gpu" / "runs" / "pretrain" / "metrics.csv"
    metrics.write_text(metrics.read_text().replace("1", "2"))
    assert "DIFFERS" in rehearsal.comparison(options, tmp_path / "gpu" / "runs", tmp_path / "cpu2")


@pytest.mark.long
def test_each_rank_has_a_row(benchmark, tmp_path):
    rehearsal = benchmark("rehearsal")
    (case,) = [case for case in rehearsal.CASES if "pipeline" in case.what]
    rows = rehearsal.script_rows(case, argparse.Namespace(**DIGITS, steps=10), tmp_path)
    assert [row.split(" |")[0].rpartition(", ")[2] for row in rows] == ["rank 0", "rank 1"]


@pytest.mark.long
def test_steps_run_on_a_gpu(tmp_path):
    own = ("--dataset", "digits", "--peers", "torch", "--rounds", "1", "--steps", "12")
    command = (sys.executable, BENCHMARKS / "steps.py", "--device", "gpu", *own, "--no-proof")
    out = run(*command, "--batches", "64", "--profile", cwd=tmp_path, **rehearsed(1)).output()
    assert "## Training steps on a GPU, by micro batch" in out
    assert "rehearsed GPU" in out
    assert re.search(r"\| 64 \| plain PyTorch \| [\d.,]+ \| [\d.,]+ \|  \|  \|", out)
    # torch's profiler sees none, and the rehearsal counts.
    assert re.search(r"plain PyTorch \| not seen \| 56\.00 \| not seen \| 0\.10 \| not seen", out)


def test_shares_of_a_micro_batch_are_taken_within_a_round(benchmark):
    def told(*rates: float) -> list[dict[str, float]]:
        return [{"steps_per_second": rate} for rate in rates]

    measured = {("ours", 1): told(100, 50), ("torch", 1): told(200, 100)}
    *_, ours, torch = benchmark("steps").batch_table({128: measured})
    assert ours == "| 128 | model_pretrain.py | 75 | 9,600 | 0.50 (0.50 to 0.50) |  |"
    assert torch == "| 128 | plain PyTorch | 150 | 19,200 |  |  |"


def test_calls_are_counted_per_step(benchmark):
    import torch
    from torch.profiler import ProfilerActivity, profile

    square = torch.ones(2, 2)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(3):
            square @ square @ square
    names = {"products": ("aten::mm",), "others": ("cudaLaunchKernel", "aten::add")}
    found = benchmark("peers.job").calls_per_step(profiler.key_averages(), 3, names)
    assert found == {"products": 2, "others": 0}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--profile",), "needs --device gpu"),
        (("--batches", "64", "--threads", "1", "2"), "takes one number of --threads"),
        (("--device", "gpu", "--peers", "ours", "published"), "and no published"),
    ],
)
def test_what_cannot_be_measured_is_an_error(options, reason):
    done = run(sys.executable, BENCHMARKS / "steps.py", *options)
    assert done.status == 2
    assert reason in done.err


# Finds the GPUs, notes what else the check starts, and keeps the table that it would write.
PYTHON = """#!/usr/bin/env bash
[[ $1 != -c ]] || exec "$REAL_PYTHON" "$@"
[[ $1 != *report.py ]] || cat > "$TABLE"
echo "$*" >> "$LOG"
"""


@pytest.mark.parametrize("options", [(), ("--write",)])
def test_the_check_of_a_gpu_measures_steps_and_writes_when_asked(tmp_path, options):
    python, log, table = (tmp_path / name for name in ("python", "log", "table"))
    python.write_text(PYTHON)
    python.chmod(0o755)
    own = {"PYTHON": python, "REAL_PYTHON": sys.executable, "LOG": log, "TABLE": table}
    changes = {name: str(value) for name, value in own.items()}
    done = run(BENCHMARKS / "gpu_check.sh", *options, **rehearsed(1, **changes))
    assert done.status == 1  # no signal came, so the resumption has failed
    (steps,) = [line for line in log.read_text().splitlines() if "steps.py" in line]
    assert "--device gpu" in steps
    assert steps.endswith(" --write") == table.exists() == bool(options)
    assert re.search(r"\| steps per second, and a profile +\| +\d+ \| passed \|", done.out)
    if options:
        assert table.read_text().rstrip().endswith(done.out.rstrip().rpartition("\n")[2])
        assert "## The check of a GPU" in table.read_text()
