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
    changes: dict[str, Any] = {"OMP_NUM_THREADS": "1"} if accelerator == "cpu" else rehearsed(1)
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


@pytest.mark.long
@pytest.mark.parametrize("layout", [(), ("--devices", 2, "--tensor-parallel", 2)])
def test_a_step_waits_once_for_the_gpu(tmp_path: Path, layout: tuple[object, ...]) -> None:
    """Megatron reads the gradient's norm; every tenth step is logged, and the losses are read."""
    waits = []
    for steps in (20, 60):
        report = tmp_path / f"report-{steps}"
        given = ("--dataset", "digits", "--accelerator", "gpu", "--precision", "bf16-mixed")
        more = ("--max-steps", steps, "--output-dir", tmp_path / str(steps), *layout)
        run_script("model_pretrain.py", *given, *more, **rehearsed(2, report)).output()
        waits.append(
            {(r := read_json(one))["rank"]: r["synchronizations"] for one in report.iterdir()}
        )
    assert all(1.0 <= (waits[1][rank] - waits[0][rank]) / 40 <= 1.5 for rank in waits[0])
