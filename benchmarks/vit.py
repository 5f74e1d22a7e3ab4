"""The vision transformer of examples/vit: accuracy, time, memory; lines that the first lacks.

    python benchmarks/vit.py --data-dir PATH [--seeds 1 2 3] [--write]

Every figure comes from the scripts as a user runs them. `--write` puts them into RESULTS.md.
"""

import argparse
import difflib
import sys
import tempfile
from pathlib import Path

from chain import SCRIPTS, accuracy
from report import DATA_DIR, REPOSITORY, Row, publish
from times import run

VIT = REPOSITORY / "examples" / "vit"
GOAL = "at least 97.5% in at most 5 minutes, on 2 cores"


def rows(data_dir: Path, folder: Path, seeds: list[int], options: list[str]) -> list[Row]:
    """Runs the three scripts at their defaults, but for the options, with each seed."""
    seconds: dict[str, list[float]] = {script: [] for script in SCRIPTS}
    megabytes: list[float] = []
    accuracies = []
    for seed in seeds:
        runs = folder / f"seed-{seed}"
        peaks = []
        for script in SCRIPTS:
            command = [sys.executable, VIT / script]
            command += ["--data-dir", data_dir.resolve(), "--output-dir", runs, *options]
            if script != "model_predict.py":
                command += ["--seed", seed]
            done = run(command, folder)
            seconds[script].append(done.seconds)
            peaks.append(done.megabytes)
        megabytes.append(max(peaks))
        accuracies.append(accuracy(runs))
    minutes = [sum(times) / 60 for times in zip(*seconds.values(), strict=True)]
    each = ", ".join(f"{value:.2f}" for value in accuracies)
    return [
        Row("test accuracy", accuracies, "%", f"seeds {', '.join(map(str, seeds))}: {each}"),
        Row("the three scripts", minutes, "min", f"the goal: {GOAL}"),
        *(Row(script, times, "s") for script, times in seconds.items()),
        Row("peak memory of the script that needs the most", megabytes, "MB"),
    ]


def own_lines() -> list[str]:
    """A table of what is new in each file, beside the first model's that it was made from."""
    table = ["| file | lines | of these, lines that the tutorial's file lacks |", "|---|---|---|"]
    made_from = {script: script for script in SCRIPTS}
    made_from["vit_components.py"] = "model_components.py"
    for name, first in made_from.items():
        lines, theirs = (
            (path.read_text().splitlines()) for path in (VIT / name, REPOSITORY / first)
        )
        new = sum(line.startswith("+ ") for line in difflib.ndiff(theirs, lines))
        table.append(f"| {name} | {len(lines)} | {new} |")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy, time and memory of examples/vit.")
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    parser.add_argument("options", nargs="*", help="for all three scripts, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = rows(arguments.data_dir, Path(folder), arguments.seeds, arguments.options)
    title = "The vision transformer of examples/vit, on MNIST"
    publish("vit", title, found, arguments.write, "", *own_lines())


if __name__ == "__main__":
    main()
