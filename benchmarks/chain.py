"""The whole tutorial: accuracy and time by seed; with --labels, what pretraining is worth.

    python benchmarks/chain.py --data-dir PATH [--labels] [--write]

Every figure comes from the scripts as a user runs them. `--write` puts them into RESULTS.md.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import DATA_DIR, REPOSITORY, Row, publish

SCRIPTS = ("model_pretrain.py", "model_finetune.py", "model_predict.py")
#: What README's commands for few labels have: a longer pretraining, and a shorter fine-tuning.
LONG: tuple[object, ...] = ("--max-steps", 2000, "--global-batch-size", 256, "--lr", 0.001)
FEW: tuple[object, ...] = ("--max-steps", 200, "--lr", 0.01)


def run(script: str, *arguments: object) -> float:
    """Runs a script; returns its seconds."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, REPOSITORY / script, *map(str, arguments)], check=True, capture_output=True
    )
    return time.perf_counter() - began


def accuracy(runs: Path) -> float:
    """Percent of predictions that are right."""
    lines = (runs / "predict" / "predictions.csv").read_text().splitlines()[1:]
    cells = [line.split(",")[1:3] for line in lines]
    return 100 * statistics.mean(label == prediction for label, prediction in cells)


def by_seed(seeds: list[int], accuracies: list[float]) -> str:
    """Lists the accuracy of each seed."""
    each = ", ".join(f"{value:.2f}" for value in accuracies)
    return f"seeds {', '.join(map(str, seeds))}: {each}"


def chain_rows(data_dir: Path, folder: Path, seeds: list[int]) -> list[Row]:
    """Runs the three scripts at their defaults with each seed."""
    seconds: dict[str, list[float]] = {script: [] for script in SCRIPTS}
    accuracies = []
    for seed in seeds:
        runs = folder / f"seed-{seed}"
        for script in SCRIPTS:
            options: list[object] = ["--data-dir", data_dir, "--output-dir", runs]
            if script != "model_predict.py":
                options += ["--seed", seed]
            seconds[script].append(run(script, *options))
        accuracies.append(accuracy(runs))
    totals = [sum(times) for times in zip(*seconds.values(), strict=True)]
    return [
        Row("test accuracy", accuracies, "%", by_seed(seeds, accuracies)),
        Row("the three scripts", totals, "s"),
        *(Row(script, times, "s") for script, times in seconds.items()),
    ]


def label_rows(data_dir: Path, folder: Path, seeds: list[int]) -> list[Row]:
    """Fine-tunes pretrained trunks and fresh ones, on all labels and on few."""
    rows = []
    for seed in seeds:
        runs = folder / f"seed-{seed}"
        run(SCRIPTS[0], "--data-dir", data_dir, "--output-dir", runs, "--seed", seed, *LONG)
    for labels, options in ((100, FEW), (500, FEW), (None, ())):
        found: dict[str, list[float]] = {"pretrained": [], "fresh": []}
        for seed in seeds:
            for trunk, accuracies in found.items():
                runs = folder / f"{labels}-{trunk}-{seed}"
                start: object = "none"
                if trunk == "pretrained":
                    checkpoints = folder / f"seed-{seed}" / "pretrain" / "checkpoints"
                    start = max(checkpoints.glob("step=*"))
                common = ["--data-dir", data_dir, "--output-dir", runs]
                only = ["--num-labels", labels] if labels else []
                run(SCRIPTS[1], *common, "--seed", seed, "--checkpoint", start, *options, *only)
                run(SCRIPTS[2], *common)
                accuracies.append(accuracy(runs))
        gain = statistics.mean(found["pretrained"]) - statistics.mean(found["fresh"])
        name = f"{labels:,} labels" if labels else "all 55,000 labels"
        rows += [
            Row(
                f"{name}, pretrained trunk",
                found["pretrained"],
                "%",
                f"{gain:+.1f} points in the mean; {by_seed(seeds, found['pretrained'])}",
            ),
            Row(f"{name}, fresh trunk", found["fresh"], "%", by_seed(seeds, found["fresh"])),
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy and time of the whole tutorial.")
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2, 3, 4, 5])
    parser.add_argument("--labels", action="store_true", help="by number of labels, 3 seeds")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.labels:
            name, title = "labels", "What pretraining is worth, on MNIST: test accuracy"
            rows = label_rows(options.data_dir, Path(folder), options.seeds[:3])
        else:
            name, title = "chain", "The chain, on MNIST"
            rows = chain_rows(options.data_dir, Path(folder), options.seeds)
    publish(name, title, rows, options.write)


if __name__ == "__main__":
    main()
