"""The chain in bf16 on a rehearsed GPU: its results are those of a CPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.parallel.test_step_graph import start
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


#: Each rank writes what it has counted between two steps.
COUNTING = """
import itertools, json, os, torch, types
import megakit.training.stopping as stopping
# As on a GPU, whose 32 steps take less than the second after which ranks agree on signals.
stopping.time = types.SimpleNamespace(monotonic=itertools.count(1e-6, 1e-6).__next__)
before = {}
class Count(parts.pl.Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 10:
            before.update(torch.cuda.rehearsed_counts)
        if trainer.global_step == 42:
            counts = torch.cuda.rehearsed_counts
            costs = {name: (counts[name] - before[name]) / 32 for name in counts}
            with open(f"{os.environ['COSTS']}-{os.environ.get('RANK', 0)}.json", "w") as file:
                json.dump(costs, file)
build = trainers.build_trainer
trainers.build_trainer = lambda run, callbacks=(): build(run, [*callbacks, Count()])
"""


@pytest.mark.long
@pytest.mark.parametrize(("layout", "limits"), LIMITS.items())
def test_a_step_costs_no_more_and_a_graph_gives_the_same(
    tmp_path: Path, layout: tuple[object, ...], limits: tuple[Costs, Costs]
) -> None:
    """Of the steps from 11 to 42, in which two chunks of 16 batches are copied.

    And each process opens its own GPU alone, the launcher none.
    """
    tables = []
    for launches, graph in enumerate((None, "1")):
        folder = tmp_path / str(launches)
        ends = ("--max-steps", 66, "--val-interval", 66, "--save-interval", 66)
        options = ("--precision", "bf16-mixed", *ends, *layout)
        changes = {"REHEARSE_GRAPH": graph, "COSTS": str(tmp_path / f"costs-{launches}")}
        start(folder, COUNTING, *options, **changes).output()
        of_ranks = [*map(read_json, tmp_path.glob(f"costs-{launches}-*.json"))]
        opened = sorted(read_json(report)["opened"] for report in (folder / "report").iterdir())
        assert opened == [[rank] for rank in range(len(of_ranks))]
        for costs in of_ranks:
            assert costs["launches"] == launches
            assert costs["copied_bytes"] > 0  # a chunk is copied in these steps
            for name, limit in zip(COSTS, limits[launches], strict=True):
                assert costs[name] <= limit, f"{name}: {costs}"
        tables.append((folder / "pretrain" / "metrics.csv").read_bytes())
    assert tables[0] == tables[1]
