"""The chain in bf16 on a rehearsed GPU: its results are those of a CPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import read_json, rehearsed, run_script


def chain(runs: Path, accelerator: str) -> None:
    """Runs the three scripts on a few steps."""
    common: tuple[object, ...] = ("--dataset", "digits", "--output-dir", runs)
    common += ("--accelerator", accelerator, "--precision", "bf16-mixed")
    steps = ("--max-steps", 40, "--global-batch-size", 256)
    changes = rehearsed(1)
    if accelerator == "cpu":
        del changes["REHEARSE_GPUS"]
        changes["ROUND_RATE"] = "1"
    for script in ("model_pretrain.py", "model_finetune.py", "model_predict.py"):
        given = common if script == "model_predict.py" else (*common, *steps)
        run_script(script, *given, **changes).output()


@pytest.mark.long
def test_the_chain_gives_the_results_of_a_cpu(tmp_path: Path) -> None:
    """A difference in metrics.csv means that a GPU would compute something else than a CPU."""
    with ThreadPoolExecutor() as pool:
        cpu = pool.submit(chain, tmp_path / "cpu", "cpu")
        gpu = pool.submit(chain, tmp_path / "gpu", "gpu")
        cpu.result(), gpu.result()

    for name in ("pretrain/metrics.csv", "finetune/metrics.csv", "predict/predictions.csv"):
        found, expected = (tmp_path / device / name for device in ("gpu", "cpu"))
        assert found.read_bytes() == expected.read_bytes(), name


#: Counts of a report, and what a step costs at most in each layout, by Python and in a CUDA graph,
#: at a micro batch of 128. Every tenth step is logged, and reads the losses and the gradients'
#: norms. Some steps' indices are copied together. Several ranks agree on signals once a second, at
#: least in every 32nd step: a wait and a copy.
COSTS = ("synchronizations", "kernels", "launches", "copies", "copied_bytes")
Costs = tuple[float, ...]
LIMITS: dict[tuple[object, ...], tuple[Costs, Costs]] = {
    ("--global-batch-size", 128): ((0.15, 64, 0, 0.15, 2100), (0.15, 8, 1, 0.15, 2100)),
    ("--global-batch-size", 128, "--devices", 2, "--tensor-parallel", 2): (
        (0.3, 70, 0, 0.3, 2100),
        (0.3, 8, 1, 0.3, 2100),
    ),
    ("--global-batch-size", 256, "--devices", 2): (
        (0.3, 71, 0, 0.3, 2100),
        (0.3, 8, 1, 0.3, 2100),
    ),
}


def costs_of_a_step(folder: Path, layout: tuple[object, ...], **changes: str) -> dict[str, float]:
    """By count of a report: the most that a rank does in a step, of the steps from 21 to 60."""
    reports: list[dict[int, dict[str, Any]]] = []
    for steps in (20, 60):
        report = folder / f"report-{steps}"
        given = ("--dataset", "digits", "--accelerator", "gpu", "--precision", "bf16-mixed")
        more = ("--max-steps", steps, "--output-dir", folder / str(steps), *layout)
        run_script("model_pretrain.py", *given, *more, **rehearsed(2, report), **changes).output()
        reports.append({one["rank"]: one for one in map(read_json, report.iterdir())})
    few, many = reports
    return {name: max((many[rank][name] - few[rank][name]) / 40 for rank in few) for name in COSTS}


@pytest.mark.long
@pytest.mark.parametrize(("layout", "limits"), LIMITS.items())
def test_a_step_costs_no_more_and_a_graph_gives_the_same(
    tmp_path: Path, layout: tuple[object, ...], limits: tuple[Costs, Costs]
) -> None:
    eager = costs_of_a_step(tmp_path / "eager", layout)
    graph = costs_of_a_step(tmp_path / "graph", layout, REHEARSE_GRAPH="1")
    for costs, most in zip((eager, graph), limits, strict=True):
        for name, limit in zip(COSTS, most, strict=True):
            assert costs[name] <= limit, f"{name}: {costs}"
    assert (graph["launches"], eager["launches"]) == (1, 0)
    tables = [tmp_path / kind / "60" / "pretrain" / "metrics.csv" for kind in ("eager", "graph")]
    assert tables[0].read_bytes() == tables[1].read_bytes()
