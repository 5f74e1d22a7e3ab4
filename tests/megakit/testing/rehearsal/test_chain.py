"""The chain in bf16 on a rehearsed GPU: its results, and what a step costs the GPU and the host."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.scripts import REPOSITORY, read_json, rehearsed, run_script

#: What a step of 256 images may take, in the mean of 30 steps; a step that logs waits once more.
#: An epoch of the bundled digits is five steps; copies are made for several steps at once.
BUDGETS = {
    # script: kernels, synchronizations, copies, bytes
    "model_pretrain.py": (58, 1.1, 0.3, 200_000),
    "model_finetune.py": (54, 1.1, 0.3, 200_000),
}
#: A step of examples/gpt with two layers; Megatron's cross entropy waits twice, its count of tokens
#: once.
GPT_BUDGET = (185, 5.1, 0.3, 200_000)
KINDS = ("kernels", "synchronizations", "copies", "bytes")


def chain(runs: Path, accelerator: str, report: Path | None = None) -> None:
    """Runs the three scripts on a few steps."""
    common: tuple[object, ...] = ("--dataset", "digits", "--output-dir", runs)
    common += ("--accelerator", accelerator, "--precision", "bf16-mixed")
    steps = ("--max-steps", 40, "--global-batch-size", 256)
    changes: dict[str, Any] = {"OMP_NUM_THREADS": "1"} if report is None else rehearsed(1, report)
    for script in ("model_pretrain.py", "model_finetune.py", "model_predict.py"):
        given = common if script == "model_predict.py" else (*common, *steps)
        run_script(script, *given, **changes).output()


def over_budget(report: dict[str, Any], budget: tuple[float, ...]) -> list[str]:
    """What a step takes too much of, and the places that take it, the worst first."""
    taken = {kind: mean(step[kind] for step in report["steps"]) for kind in KINDS}
    return [
        f"{kind}: {taken[kind]:g} per step, above {limit:g}\n"
        + "\n".join(
            f"  {place['per_step']:.2f} {place['cause']} at {place['place']}"
            for place in report["places"]
            if place["kind"] == ("copies" if kind == "bytes" else kind)
        )
        for kind, limit in zip(KINDS, budget, strict=True)
        if taken[kind] > limit
    ]


@pytest.mark.long
def test_the_chain_gives_the_results_of_a_cpu_within_its_budget(tmp_path: Path) -> None:
    """A difference in metrics.csv means that a GPU would compute something else than a CPU."""
    with ThreadPoolExecutor() as pool:
        cpu = pool.submit(chain, tmp_path / "cpu", "cpu")
        gpu = pool.submit(chain, tmp_path / "gpu", "gpu", tmp_path / "report")
        cpu.result(), gpu.result()

    for name in ("pretrain/metrics.csv", "finetune/metrics.csv", "predict/predictions.csv"):
        found, expected = (tmp_path / device / name for device in ("gpu", "cpu"))
        assert found.read_bytes() == expected.read_bytes(), name

    # Neither a worker nor a helper of the checkpoint's writer opens the GPU.
    reports = [*map(read_json, (tmp_path / "report").iterdir())]
    of_script = {report["command"][0]: report for report in reports}
    assert len(reports) == len(of_script) == 3
    for script, report in of_script.items():
        assert [where.partition(" at ")[0] for where in report["opened"]] == ["GPU 0"]
        if script in BUDGETS:
            assert len(report["steps"]) == 30
            assert over_budget(report, BUDGETS[script]) == []


def language_model(
    runs: Path, accelerator: str, precision: str, report: Path | None = None
) -> None:
    """Trains a small language model for a few steps, and generates text."""
    common = ("--output-dir", runs, "--accelerator", accelerator, "--precision", precision)
    sizes = ("--num-layers", 2, "--hidden-size", 32, "--block-size", 32)
    text = ("--text", REPOSITORY / "LICENSE", "--max-steps", 40)
    changes: dict[str, Any] = {"OMP_NUM_THREADS": "1"}
    changes = changes if accelerator == "cpu" else rehearsed(1, report)
    run_script("examples/gpt/model_pretrain.py", *common, *sizes, *text, **changes).output()
    run_script("examples/gpt/model_sample.py", *common, "--num-bytes", 50, **changes).output()


@pytest.mark.long
def test_the_language_model_gives_the_results_of_a_cpu(tmp_path: Path) -> None:
    """In float32: on a GPU, autocast runs other operations in bfloat16 than on a CPU."""
    for accelerator in ("cpu", "gpu"):
        language_model(tmp_path / accelerator, accelerator, "32")
    for name in ("pretrain/metrics.csv", "sample/sample.txt"):
        found, expected = (tmp_path / device / name for device in ("gpu", "cpu"))
        assert found.read_bytes() == expected.read_bytes(), name


@pytest.mark.long
def test_the_language_model_stays_within_its_budget(tmp_path: Path) -> None:
    language_model(tmp_path, "gpu", "bf16-mixed", tmp_path / "report")
    reports = [*map(read_json, (tmp_path / "report").iterdir())]
    (training,) = [report for report in reports if report["steps"]]
    assert len(training["steps"]) == 30
    assert over_budget(training, GPT_BUDGET) == []
