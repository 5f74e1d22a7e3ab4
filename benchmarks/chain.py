"""The whole tutorial: accuracy and time by seed; with --labels, what pretraining is worth.

    python benchmarks/chain.py --data-dir PATH [--labels] [--write]

Every figure comes from the scripts as a user runs them. `--write` puts them into RESULTS.md.
"""

import statistics
import sys
import tempfile
from pathlib import Path

import times
from report import REPOSITORY, Row, parser_of, publish
from times import SCRIPTS, Done, accuracy

#: What README's commands for few labels have: a longer pretraining, and a shorter fine-tuning.
LONG: tuple[object, ...] = ("--max-steps", 2000, "--global-batch-size", 256, "--lr", 0.001)
FEW: tuple[object, ...] = ("--max-steps", 200, "--lr", 0.01)


def run(script: str, *arguments: object) -> Done:
    """Runs a script of the repository, in this folder."""
    return times.run([sys.executable, REPOSITORY / script, *arguments], Path.cwd())


def by_seed(seeds: list[int], accuracies: list[float]) -> str:
    """Lists the accuracy of each seed."""
    each = ", ".join(f"{value:.2f}" for value in accuracies)
    return f"seeds {', '.join(map(str, seeds))}: {each}"


def chain_rows(folder: Path, seeds: list[int], place: str, options: list[object]) -> list[Row]:
    """Runs the three scripts of a folder at their defaults, but for the options, with each seed."""
    done: dict[str, list[Done]] = {script: [] for script in SCRIPTS}
    accuracies = []
    for seed in seeds:
        common = ["--output-dir", folder / f"seed-{seed}", *options]
        for script, own in zip(SCRIPTS, (["--seed", seed], ["--seed", seed], []), strict=True):
            done[script].append(run(f"{place}/{script}", *common, *own))
        accuracies.append(accuracy(folder / f"seed-{seed}"))
    seconds = {script: [one.seconds for one in found] for script, found in done.items()}
    totals = [sum(each) for each in zip(*seconds.values(), strict=True)]
    peaks = [max(one.megabytes for one in each) for each in zip(*done.values(), strict=True)]
    return [
        Row("test accuracy", accuracies, "%", by_seed(seeds, accuracies)),
        Row("the three scripts", totals, "s"),
        *(Row(script, values, "s") for script, values in seconds.items()),
        Row("peak memory of the script that needs the most", peaks, "MB"),
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
    parser = parser_of("Accuracy and time of the whole tutorial.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2, 3, 4, 5])
    parser.add_argument("--labels", action="store_true", help="by number of labels, 3 seeds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.labels:
            name, title = "labels", "What pretraining is worth, on MNIST: test accuracy"
            rows = label_rows(options.data_dir, Path(folder), options.seeds[:3])
        else:
            name, title = "chain", "The chain, on MNIST"
            common: list[object] = ["--data-dir", options.data_dir]
            rows = chain_rows(Path(folder), options.seeds, ".", common)
    publish(name, title, rows, options.write)


if __name__ == "__main__":
    main()
