"""By how much the layouts of the tutorial differ from one process: what `./run compare` allows.

    python benchmarks/rounding.py --data-dir PATH [--seeds 42 1] [--runs PATH] [--write]

The scripts run as a user starts them. `--runs` names a folder that keeps the runs; finished runs in
it are not trained again.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from report import REPOSITORY, machine, parser_of, write_section

from tools.compare import LIMITS, MIXED, compare, read_run

TP, PP = ("--tensor-parallel", "2"), ("--pipeline-parallel", "2")
LAYOUTS = {
    "TP2": ("--devices", "2", *TP),
    "PP2": ("--devices", "2", *PP),
    "DP2": ("--devices", "2"),
    "TP2 x PP2": ("--devices", "4", *TP, *PP),
    "micro batches of 32": ("--micro-batch-size", "32"),
}
SHORT = ("--max-steps", "10", "--limit-val-batches", "2")
EXAMPLES = {"examples/gpt": SHORT, "examples/vit": (*SHORT, "--dataset", "digits")}
#: Columns of the table: the stage, the column of metrics.csv, the first and the last step.
CELLS = (
    *(("pretrain", "train_loss", *steps) for steps in ((1, 10), (100, 100), (500, 500))),
    *(("finetune", "train_loss", *steps) for steps in ((1, 10), (100, 100), (1500, 1500))),
    *((stage, "grad_norm", 1, 10) for stage in ("pretrain", "finetune")),
)
HEADER = """\
| precision | | pretrain: training loss, steps 1 to 10 | step 100 | step 500 \
| finetune: training loss, steps 1 to 10 | step 100 | step 1,500 \
| pretrain: gradient norm, steps 1 to 10 | finetune |
|---|---|---|---|---|---|---|---|---|---|"""
Pair = tuple[str, str, Path, Path]  # the limits that apply, the layout, and two run directories


def train(stage: str, runs: Path, *options: str, example: str = "") -> Path:
    """Trains a stage of the tutorial or of an example; returns the run directory."""
    script = str(REPOSITORY / example / f"model_{stage}.py")
    command = [sys.executable, script, "--output-dir", str(runs), *options]
    subprocess.run(command, check=True, capture_output=True)
    return runs / stage


def pairs(data_dir: Path, folder: Path, seed: int) -> Iterator[Pair]:
    """Trains all runs of a seed."""
    stages = ("pretrain", "finetune")
    one = {precision: folder / f"{precision}, seed {seed}" for precision in ("32", "bf16-mixed")}
    for precision, alone in one.items():
        common = ("--data-dir", str(data_dir), "--seed", str(seed), "--precision", precision)
        pretrained, finetuned = (train(stage, alone, *common) for stage in stages)
        checkpoint = ("--checkpoint", str(pretrained / "checkpoints" / "step=000500"))
        for name, layout in LAYOUTS.items():
            place = folder / f"{precision}, seed {seed}, {name}"
            yield precision, name, pretrained, train("pretrain", place, *common, *layout)
            own = train("finetune", place, *common, *layout)
            yield "32" if precision == "32" else MIXED, name, finetuned, own
            if precision != "32":
                same = train("finetune", place / "same", *common, *layout, *checkpoint)
                yield precision, name, finetuned, same
    for stage in stages:
        first, second = (alone / stage for alone in one.values())
        yield MIXED, "one process in 32", first, second


def pairs_of_example(example: str, folder: Path, seed: int) -> Iterator[Pair]:
    """Trains 10 steps of a transformer, which differs more in bfloat16."""
    for precision in ("32", "bf16-mixed"):
        common = ["--seed", str(seed), "--precision", precision, *EXAMPLES[example]]
        place = folder / f"{example}, {precision}"
        runs = {
            name: train("pretrain", place / name, *common, *layout, example=example)
            for name, layout in {"one process": (), **LAYOUTS}.items()
            if name in ("one process", "TP2", "PP2", "DP2")
        }
        for name in list(runs)[1:]:
            yield precision, f"{example}, {name}", runs["one process"], runs[name]


@cache
def differences(one: Path, other: Path) -> dict[str, dict[int, float]]:
    return compare(read_run(one), read_run(other)).differences


def rows(found: list[Pair]) -> Iterator[str]:
    """Yields the table: the largest differences of all seeds."""
    for limits in LIMITS:
        for name in dict.fromkeys(name for case, name, *_ in found if case == limits):
            cells = []
            for stage, column, first, last in CELLS:
                values = [
                    value
                    for case, layout, one, other in found
                    if (case, layout, one.name) == (limits, name, stage)
                    for step, value in differences(one, other)[column].items()
                    if first <= step <= last
                ]
                cells.append(f"{max(values):.1e}" if values else "")
            yield f"| {limits} | {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = parser_of("Layouts against one process, step by step.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1])
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.runs or Path(temporary)
        found = [pair for seed in options.seeds for pair in pairs(options.data_dir, folder, seed)]
        for example in EXAMPLES:
            found += pairs_of_example(example, folder, options.seeds[0])
        table = "\n".join(rows(found))
    where = machine("nemo_toolkit", "megatron-core").removesuffix("; median, lowest to highest.")
    seeds = ", ".join(map(str, options.seeds))
    text = f"""\
## Rounding

{where}.

Relative differences from one process, the largest of the seeds {seeds}. In float32, and in the \
rows of other start checkpoints, each layout fine-tunes the checkpoint that it pretrained. \
The examples train 10 steps with the first seed.

{HEADER}
{table}"""
    print(text)
    if options.write:
        write_section("rounding", text)


if __name__ == "__main__":
    main()
