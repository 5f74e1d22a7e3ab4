"""Layouts against one process: largest differences, and steps/s.

    python benchmarks/parallel.py [--steps 200] [--write]

Real processes on this machine's CPU cores, the bundled digits, float32, `Ranks` as in the tests.
Differences are to one process: of the loss relative, of weights and probabilities absolute.
"""

import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import REPOSITORY, machine, parser_of, write_section

from megakit.job.layout import Layout
from megakit.testing import Ranks

LAYOUTS = {
    "1 process": {},
    "TP2": {"world_size": 2, "tensor": 2},
    "PP2": {"world_size": 2, "pipeline": 2},
    "DP2": {"world_size": 2},
    "TP2 x PP2": {"world_size": 4, "tensor": 2, "pipeline": 2},
    "TP2 x DP2": {"world_size": 4, "tensor": 2},
    "PP2 x DP2": {"world_size": 4, "pipeline": 2},
}
CUT = {"linear1.weight": 0, "linear1.bias": 0, "linear2.weight": 1}
CUT |= {"linear3.weight": 0, "linear3.bias": 0, "linear4.weight": 1}


def load_jobs() -> Any:
    """What the tests' ranks run, by its path: an installed package may be called `tests`, too."""
    path = REPOSITORY / "tests" / "parallel" / "jobs.py"
    spec = importlib.util.spec_from_file_location("parallel_jobs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


jobs = load_jobs()


@dataclass
class Outcome:
    losses: np.ndarray
    weights: dict[str, np.ndarray]
    probabilities: np.ndarray
    rate: float


def whole(ranks: list[Any]) -> dict[str, np.ndarray]:
    """The full weights, put together from the parts of all ranks."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for rank in ranks:
        for name, part in rank.last.items():
            found.setdefault(name, {})[rank.place[0]] = part
    return {
        name: np.concatenate([parts[k] for k in sorted(parts)], axis=CUT[name])
        if name in CUT
        else parts[0]
        for name, parts in found.items()
    }


def measure(pool: Ranks, layout: Layout, steps: int, checkpoint: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        ranks = train(pool, layout, steps, Path(folder))
        size = layout.world_size
        path = pool.run(jobs.predict, layout, Path(folder), checkpoint, world_size=size)[0]
        rows = [line.split(",") for line in Path(path).read_text().splitlines()[1:]]
    losses = next(np.array(rank.losses) for rank in ranks if rank.losses)
    probabilities = np.array([[float(value) for value in row[3:]] for row in rows])
    slowest = max(rank.seconds for rank in ranks)
    return Outcome(losses, whole(ranks), probabilities, steps / slowest)


def train(pool: Ranks, layout: Layout, steps: int, folder: Path) -> list[Any]:
    return pool.run(jobs.pretrain, layout, folder, steps, world_size=layout.world_size)


def layout_rows(pool: Ranks, steps: int) -> list[str]:
    """The table of layouts."""
    rows = ["| layout | loss | weights | probabilities | steps/s |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = pool.run(jobs.finetune, jobs.layout(), Path(folder), world_size=1)[0]
        one: Outcome | None = None
        for name, sizes in LAYOUTS.items():
            found = measure(pool, jobs.layout(**sizes), steps, checkpoint)
            one = one or found
            loss = np.abs(found.losses / one.losses - 1).max()
            weights = max(
                np.abs(found.weights[key] - one.weights[key]).max() for key in one.weights
            )
            chances = np.abs(found.probabilities - one.probabilities).max()
            rows.append(
                f"| {name} | {loss:.1e} | {weights:.1e} | {chances:.1e} | {found.rate:.0f} |"
            )
    return rows


def main() -> None:
    parser = parser_of("Layouts against one process.", needs_images=False)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with Ranks(4, timeout=600) as pool:
        layouts = layout_rows(pool, options.steps)
    # The differences are exact, the rates are for comparison with one another.
    where = machine("nemo_toolkit", "megatron-core").removesuffix("; median, lowest to highest.")
    cores = len(os.sched_getaffinity(0))
    text = "\n".join(
        [
            *("## Layouts", "", f"{where}.", ""),
            f"{options.steps} steps of {jobs.GLOBAL_BATCH} samples, float32, one run of each "
            "layout. The differences are the largest ones from one process, relative for the loss "
            f"and absolute for weights and probabilities. Four ranks share {cores} cores.",
            *("", *layouts),
        ]
    )
    print(text)
    if options.write:
        write_section("parallel", text)


if __name__ == "__main__":
    main()
