"""Counts kernels, synchronizations and copies per training step, on rehearsed GPUs.

    python benchmarks/rehearsal.py [--data-dir PATH] [--steps 200] [--write]

The scripts, plain PyTorch, plain Lightning and the published tutorial train on rehearsed GPUs
(`megakit.testing.rehearsal`), which count every operation. The benchmark needs no GPU and measures
no time. `--write` puts the table into RESULTS.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from report import REPOSITORY, machine, write_section
from steps import TITLES, mean, train

from megakit.testing.rehearsal import rehearsed_environment

HERE = Path(__file__).resolve().parent
#: Samples of a step, of all ranks together.
BATCH = 256
#: As `model_pretrain.py` has it.
CORRUPTION = 0.2
#: The first steps allocate, and are not counted.
WARM_UP = 6
#: The counts of each step of a rank or a peer.
Steps = list[dict[str, int]]


@dataclass(frozen=True)
class Case:
    """A training by one of the scripts.

    Attributes:
        what: What the table calls it.
        script: Its path in the repository.
        options: Its own options.
        gpus: How many there are, one for each rank.
        batch: Samples of a step, of all ranks together.
        reads_images: Whether the script takes --data-dir and --dataset.
    """

    what: str
    script: str
    options: tuple[str, ...] = ()
    gpus: int = 1
    batch: int = BATCH
    reads_images: bool = True


PRETRAIN = "model_pretrain.py"
RANDOM = ("--checkpoint", "none")
CASES = (
    Case("pretrain", PRETRAIN),
    Case("finetune", "model_finetune.py", RANDOM),
    Case("vision transformer, pretrain", "examples/vit/model_pretrain.py"),
    Case("vision transformer, finetune", "examples/vit/model_finetune.py", RANDOM),
    Case(
        "language model of four layers, pretrain",
        "examples/gpt/model_pretrain.py",
        batch=8,
        reads_images=False,
    ),
    Case("pretrain, pipeline of two", PRETRAIN, ("--pipeline-parallel", "2"), 2),
    Case("pretrain, tensor parallel of two", PRETRAIN, ("--tensor-parallel", "2"), 2),
    Case("pretrain, data parallel of two", PRETRAIN, (), 2),
)


def run(command: list[object], environment: dict[str, str]) -> None:
    """Runs a command of Python to its end."""
    whole = [sys.executable, *map(str, command)]
    one_thread = {**environment, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(whole, env=one_thread, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(whole)} failed:\n{done.stderr[-4000:]}")


def rehearse(command: list[object], gpus: int, folder: Path) -> list[Steps]:
    """Runs a command with so many rehearsed GPUs; returns the counts of its ranks, in order."""
    environment = rehearsed_environment(gpus, report=folder / "report")
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # chooses among the machine's own
    environment["PYTHONPATH"] += f":{REPOSITORY}:{HERE}"
    run(command, environment)
    reports = [json.loads(path.read_text()) for path in (folder / "report").glob("*.json")]
    ranks = sorted((one for one in reports if one["steps"]), key=lambda one: one["rank"])
    if len(ranks) != gpus:
        sys.exit(f"{command}: {len(ranks)} processes have counted steps, expected {gpus}")
    return [one["steps"] for one in ranks]


def script_command(case: Case, options: argparse.Namespace, output_dir: Path) -> list[object]:
    """A script that validates and saves only after the counted steps."""
    last = options.steps + WARM_UP
    intervals = ("--max-steps", last, "--val-interval", last, "--save-interval", last)
    images = ("--data-dir", options.data_dir, "--dataset", options.dataset)
    where = images if case.reads_images else ()
    size = ("--global-batch-size", case.batch, "--devices", case.gpus)
    own = (REPOSITORY / case.script, *where, *size, *intervals, *case.options)
    return [*own, "--output-dir", output_dir]


def row(what: str, steps: Steps) -> str:
    """A line of the table."""
    medians = [
        statistics.median(step.get(kind, 0) for step in steps)
        for kind in ("kernels", "synchronizations")
    ]
    means = [mean(steps, kind) for kind in ("synchronizations", "copies", "bytes")]
    megabytes = means.pop() / 1e6
    cells = [*(f"{value:g}" for value in medians), *(f"{value:.2f}" for value in means)]
    return f"| {what} | {' | '.join(cells)} | {megabytes:.3f} |"


def script_rows(case: Case, options: argparse.Namespace, folder: Path) -> list[str]:
    """A line for each rank."""
    command = [*script_command(case, options, folder / "runs"), "--accelerator", "gpu"]
    ranks = rehearse(command, case.gpus, folder)
    if len(ranks) == 1:
        return [row(case.what, ranks[0])]
    return [row(f"{case.what}, rank {rank}", steps) for rank, steps in enumerate(ranks)]


def peer_rows(options: argparse.Namespace, folder: Path) -> list[str]:
    """A line for each peer, on the same data; the published tutorial draws its own samples."""
    rows = []
    where = {"data_dir": options.data_dir, "dataset": options.dataset, "device": "gpu"}
    sizes = {"steps": options.steps + WARM_UP, "warm_up": WARM_UP, "batch_size": BATCH}
    for peer in ("lightning", "torch"):
        told = train(peer, 1, **where, **sizes, corruption=CORRUPTION, count=True)
        rows.append(row(f"pretrain, {TITLES[peer]}", told["counts"]))
    if options.dataset == "mnist":  # the published tutorial reads no other
        last = options.steps + WARM_UP
        script = [HERE / "peers" / "published.py", "pretrain", "--gpu"]
        size = ["--steps", last, "--interval", last, "--batch-size", BATCH]
        where_to = ["--data-dir", options.data_dir, "--folder", folder]
        (steps,) = rehearse([*script, *size, *where_to], 1, folder)
        rows.append(row(f"pretrain, {TITLES['published']}", steps))
    return rows


def comparison(options: argparse.Namespace, rehearsed: Path, folder: Path) -> str:
    """Says whether the rehearsed pretraining and a CPU's write the same metrics.csv."""
    command = [*script_command(CASES[0], options, folder), "--accelerator", "cpu"]
    run([*command, "--precision", "bf16-mixed"], {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    tables = [path / "pretrain" / "metrics.csv" for path in (rehearsed, folder)]
    is_same = tables[0].read_bytes() == tables[1].read_bytes()
    verdict = "equals, byte for byte," if is_same else "DIFFERS from"
    other = "metrics.csv of pretraining on a CPU in bf16-mixed"
    return f"metrics.csv of the rehearsed pretraining {verdict} {other}."


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels, synchronizations and copies per step.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--dataset", default="mnist", choices=["mnist", "digits"])
    parser.add_argument("--steps", type=int, default=200, help="counted steps, at most 200")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    options.data_dir = options.data_dir.absolute()
    heads = ["kernels", "synchronizations", "synchronizations, mean", "copies, mean", "MB, mean"]
    table = [f"| training step of {BATCH} samples | {' | '.join(heads)} |"]
    table.append("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, str(number)) for number in range(len(CASES) + 2)]
        for case, folder in zip(CASES, folders, strict=False):
            table += script_rows(case, options, folder)
            print(table[-1], file=sys.stderr, flush=True)
        table += peer_rows(options, folders[-2])
        same = comparison(options, folders[0] / "runs", folders[-1])
    caption = machine("lightning", "nemo_toolkit", "megatron-core", device="cpu")
    caption = caption.replace("; median, lowest to highest", "")
    caption += (
        f" {options.steps} steps on rehearsed (simulated) GPUs, bf16-mixed; the language model has "
        "steps of 8 blocks of 128 tokens. The median is the count of a step without a log; the "
        "mean also covers the steps with a log. Copies and megabytes are transfers between host "
        "and GPU."
    )
    text = "\n".join(
        [
            "## Kernels, synchronizations and copies per training step",
            "",
            caption,
            "",
            *table,
            "",
            same,
        ]
    )
    print(text)
    if options.write:
        write_section("rehearsal", text)


if __name__ == "__main__":
    main()
