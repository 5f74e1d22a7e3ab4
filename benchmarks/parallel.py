"""Layouts against one process: largest differences, steps/s, and how cost grows with ranks.

    python benchmarks/parallel.py [--steps 200] [--write]

Real processes on this machine's CPU cores, the bundled digits, float32, `Ranks` as in the tests.
Differences are to one process: of the loss relative, of weights and probabilities absolute.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from report import REPOSITORY, machine, write_section

from megakit.testing import Ranks
from megakit.training.layout import Layout

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
            found.setdefault(name, {})[rank.tensor_rank] = part
    return {
        name: np.concatenate([parts[k] for k in sorted(parts)], axis=CUT[name])
        if name in CUT
        else parts[0]
        for name, parts in found.items()
    }


def measure(pool: Ranks, layout: Layout, steps: int, checkpoint: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        size = layout.world_size
        ranks = pool.run(jobs.pretrain, layout, Path(folder), steps, world_size=size)
        path = pool.run(jobs.predict, layout, Path(folder), checkpoint, world_size=size)[0]
        rows = [line.split(",") for line in Path(path).read_text().splitlines()[1:]]
    losses = next(np.array(rank.losses) for rank in ranks if rank.losses)
    probabilities = np.array([[float(value) for value in row[3:]] for row in rows])
    rate = steps / max(rank.seconds for rank in ranks)
    return Outcome(losses, whole(ranks), probabilities, rate)


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


def scaling_rows(pool: Ranks, steps: int) -> list[str]:
    """Strong scaling: the same global batch on more ranks. Weak: the same batch on each rank."""
    size = 1024
    one = Layout(1, 1, 1, 1, size, size)
    runs = {
        "strong: 1,024 samples in all": [one, replace(one, devices=2, micro_batch_size=size // 2)],
        "weak: 1,024 samples on each rank": [
            one,
            replace(one, devices=2, global_batch_size=2 * size),
        ],
    }
    rows = [
        "| data parallel | 1 process, samples/s | 2 | 4, modelled | 8, modelled |",
        "|---|---|---|---|---|",
    ]
    for name, layouts in runs.items():
        rates = []
        for layout in layouts:
            with tempfile.TemporaryDirectory() as folder:
                ranks = pool.run(
                    *(jobs.pretrain, layout, Path(folder), steps), world_size=layout.world_size
                )
            slowest = max(rank.seconds for rank in ranks)
            rates.append(steps * layout.global_batch_size / slowest)
        modelled = [
            model(rates, number, weak=name.startswith("weak"), size=size) for number in (4, 8)
        ]
        cells = [*rates, *modelled]
        rows.append(f"| {name} | " + " | ".join(f"{cell:,.0f}" for cell in cells) + " |")
    return rows


def model(rates: list[float], number: int, weak: bool, size: int) -> float:
    """Samples/s of more ranks, each with a core of its own.

    A step is work that the samples on a rank cause, plus what talking costs. From one and two ranks
    both are known; a ring all-reduce of the gradients sends 2 (n - 1) / n of them from each rank.
    """
    alone = size / rates[0]
    work = alone if weak else alone / number
    batch_of_two = 2 * size if weak else size
    talking_of_two = max(0.0, batch_of_two / rates[1] - (alone if weak else alone / 2))
    talking = talking_of_two * 2 * (number - 1) / number
    return (number * size if weak else size) / (work + talking)


def main() -> None:
    parser = argparse.ArgumentParser(description="Layouts against one process.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    options = parser.parse_args()
    with Ranks(4, timeout=600) as pool:
        layouts = layout_rows(pool, options.steps)
        scaling = scaling_rows(pool, options.steps)
    # One run each: the differences are exact, the rates are for comparison with one another.
    caption = machine("nemo_toolkit", "megatron-core").removesuffix(" median, lowest to highest.")
    text = "\n".join(
        [
            *("## Layouts", "", caption, ""),
            f"{options.steps} steps of {jobs.GLOBAL_BATCH}, float32, one run each; largest "
            "difference to one process. Four ranks share "
            f"{len(os.sched_getaffinity(0))} cores here.",
            *("", *layouts, "", *scaling),
        ]
    )
    print(text)
    if options.write:
        write_section("parallel", text)


if __name__ == "__main__":
    main()
