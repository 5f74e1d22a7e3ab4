"""Says whether two training runs differ by rounding or by a bug.

RUN is a run directory such as runs/a/pretrain, a folder that contains one run, or a metrics.csv.
The verdict rests on the first logged steps: a bug shows there, and rounding is still small. Exit
status: 0 the runs are equal or differ by rounding in these steps; 1 a bug; 2 the runs cannot be
compared.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megakit.errors import UserError, reading
from megakit.training.metrics_csv import Metrics, in_words, read_metrics

#: Later, training at a high learning rate amplifies rounding to percents.
LAST_STEP = 10
MIXED = "bf16-mixed, other start checkpoint or precision"
#: The largest relative differences by rounding at step 1, of validations at any step: at least
#: three times those of benchmarks/rounding.py. A run computes the columns in this order.
LIMITS = {
    "32": {"lr": 1e-6, "train_loss": 3e-6, "grad_norm": 3e-6, "val_loss": 1e-3},
    "bf16-mixed": {"lr": 1e-6, "train_loss": 3e-3, "grad_norm": 2e-2, "val_loss": 5e-2},
    MIXED: {"lr": 1e-6, "train_loss": 2e-2, "grad_norm": 1e-1, "val_loss": 5e-1},
}
#: Options that determine neither the model nor the samples nor the learning rate.
MAY_DIFFER = {"batch_norm", "best_by", "layout", "precision", "start", "stop_after"}
#: What to look for, by the column that differs first; `later`: after the first logged step.
CAUSES = {
    "lr": "another learning rate or schedule",
    "train_loss": "weights or samples that depend on the rank, a loss that is not averaged, "
    "BatchNorm with micro batches of another size",
    "grad_norm": "gradients that are not synchronized or not averaged, replicas that differ, a "
    "gather of sequence parallelism that needs tensor_parallel_output_grad=False; ./run check "
    "names the weights",
    "val_loss": "a validation that counts padding, or does not average over data-parallel ranks",
    "later": "the optimizer, gradients or weights that depend on the rank, the order of samples",
}


class TrainingRun(NamedTuple):
    """What a run wrote: its rows of metrics.csv by step, its options and its layout."""

    folder: Path
    rows: dict[int, Metrics]
    options: dict[str, Any]


def read_run(path: Path) -> TrainingRun:
    """Reads a run from its directory, from the folder around the directory, or by its metrics.csv.

    Raises:
        UserError: There is not exactly one run, or its files cannot be read.
    """
    files = [path] if path.name == "metrics.csv" else [*path.glob("metrics.csv")]
    files = files or sorted(path.glob("*/metrics.csv"))
    if len(files) != 1:
        found = ", ".join(file.parent.name for file in files) or "none"
        raise UserError(f"{path}: contains no single run (found: {found}). Name a run directory.")
    folder, content = files[0].parent, []
    for file in (folder / "run.json", folder / "summary.json"):  # the summary comes last
        with reading(file, "Name another run."):
            content.append(dict(json.loads(file.read_bytes())) if file.exists() else {})
            sizes = " x ".join(f"{k} {v}" for k, v in content[-1].get("parallel", {}).items())
    options = {
        k: v for k, v in content[0].items() if k not in ("files", "changes", "code", "places")
    }
    if options and sizes:
        options |= {"layout": sizes, "batch_norm": content[1].get("batch_norm_samples")}
    return TrainingRun(folder, {row.step: row for row in read_metrics(files[0])}, options)


class Comparison(NamedTuple):
    """The relative differences of two runs by column and step; `limits` is a key of `LIMITS`."""

    runs: tuple[TrainingRun, TrainingRun]
    limits: str
    differences: dict[str, dict[int, float]]

    def limit(self, column: str, step: int) -> float:
        """Returns the largest difference by rounding, which training amplifies."""
        return LIMITS[self.limits][column] * (column == "val_loss" or min(step, LAST_STEP))

    @property
    def beyond(self) -> tuple[int, str]:
        """The step and column that decide, with a difference above the limit; step 0 for none.

        This is the first one. Later, the learning rate decides first, which has no rounding to
        amplify, then a validation while the training losses still agree.
        """
        found = sorted(
            (
                (step, column)
                for column, values in self.differences.items()
                for step, value in values.items()
                if value > self.limit(column, step)
            ),
            key=lambda one: one[0],  # the first column of equals
        )
        if found and found[0][0] > LAST_STEP:
            rates = [one for one in found if one[1] == "lr"]
            losses = [one for one in found if one[1] in ("train_loss", "val_loss")]
            found = rates or (losses if losses and losses[0][1] == "val_loss" else found)
        return found[0] if found else (0, "")

    @property
    def is_bug(self) -> bool:
        """Whether the difference of `beyond` is no rounding."""
        step, column = self.beyond
        return 0 < step <= LAST_STEP or column in ("lr", "val_loss")

    def lines(self) -> Iterator[str]:
        """Yields the comparison and the verdict in words."""
        a, b = (run.options for run in self.runs)
        for name in sorted(name for name in a.keys() & b.keys() if a[name] != b[name]):
            yield f"{name}: {str(a[name])[:40]} and {str(b[name])[:40]}"
        common = {step for values in self.differences.values() for step in values}
        steps = sorted({min(common), LAST_STEP, 100, max(common)} & common)
        yield "relative difference" + "".join(f"{f'step {step}':>10}" for step in steps)
        for column, values in self.differences.items():
            cells = "".join(f"{_short(values.get(step)):>10}" for step in steps)
            most = max(values, key=values.__getitem__, default=0)
            end = f"   most: {_short(values[most])} at step {most}" if values else ""
            yield f"{in_words(column):<19}{cells}{end}"
        if "val_loss" not in self.differences:
            yield "validation loss    not judged: each micro batch updates BatchNorm's running"
            yield "                   statistics, and a rank of one run has more of them in a step"
        different = [at for values in self.differences.values() for at in values if values[at]]
        yield f"\nThe first difference is at step {min(different)}." if different else ""
        part, whole = sorted((max(run.rows), str(run.folder)) for run in self.runs)
        where = " in the common steps" * (part[0] < whole[0])
        if where:
            yield f"{part[1]} ends at step {part[0]}, and {whole[1]} at step {whole[0]}."
        step, column = self.beyond
        if column:
            value = f"{self.differences[column][step]:.1e} (limit: {self.limit(column, step):.1e})"
            yield f"Above the limit from step {step} on: the {in_words(column)} differs by {value}."
        if self.is_bug:
            is_first = column in ("lr", "val_loss") or step == min(self.differences[column])
            yield f"Verdict: a bug. Look for {CAUSES[column if is_first else 'later']}."
            yield "docs/debugging.md narrows it down, for example if one is twice the other."
        elif column:
            yield f"Verdict: rounding up to step {LAST_STEP}. Later steps are not judged: a high"
            yield "learning rate amplifies rounding, but a bug may begin small, too."
        else:
            yield f"Verdict: {'rounding' if different else 'equal'}{where}."
        limits = ", ".join(f"{in_words(k)} {limit:.0e}" for k, limit in LIMITS[self.limits].items())
        yield f"Limits at step 1 ({self.limits}): {limits}."
        yield f"Up to step {LAST_STEP}, n times as much at step n. Later, only the learning rate"
        yield "and the validation loss decide."
        if self.limits != "32":
            yield "bfloat16 rounds coarsely, which can hide a small bug: --precision 32 shows it."


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def _relative(a: float, b: float) -> float:
    value = abs(a - b) / max(abs(a), abs(b), 1e-300)
    return 0.0 if str(a) == str(b) else math.inf if math.isnan(value) else value  # NaN equals NaN


def compare(a: TrainingRun, b: TrainingRun, precision: str | None = None) -> Comparison:
    """Compares two runs; `precision` replaces the precision in their run.json.

    Raises:
        UserError: The runs cannot be compared; all problems are listed.
    """
    where = f"{a.folder} and {b.folder}"
    both = (a.options.keys() & b.options.keys()) - MAY_DIFFER
    problems = [
        f"{where}: {name} is {a.options[name]} and {b.options[name]}. "
        "Compare runs whose options differ at most in layout, precision and start checkpoint."
        for name in sorted(both)
        if a.options[name] != b.options[name]
    ]
    if a.options and b.options and (only := (a.options.keys() ^ b.options.keys()) - MAY_DIFFER):
        names = ", ".join(sorted(only))
        problems = [f"{where}: only one has {names}. Compare two runs of one stage."]
    precisions = {precision or run.options.get("precision", "absent") for run in (a, b)}
    if not precisions <= {"32", "bf16-mixed"}:
        problems.append(f"{where}: run.json names no known precision. Add --precision.")
    samples = [n for run in (a, b) if (n := run.options.get("batch_norm"))]
    if len({*samples}) > 1:
        problems.append(
            f"{where}: the model has BatchNorm, whose statistics are those of a micro batch, of "
            f"{' and '.join(map(str, samples))} samples. Train both with the "
            f"same one: --micro-batch-size {min(samples)}."
        )
    pairs = [(row, b.rows[step]) for step, row in a.rows.items() if step in b.rows]
    if not any(row.step <= LAST_STEP for row, _ in pairs):
        problems.append(f"{where}: no common steps up to {LAST_STEP}. Log such steps in both runs.")
    if problems:
        raise UserError(problems)
    limits = max(precisions)
    if len(precisions) > 1 or (limits != "32" and a.options.get("start") != b.options.get("start")):
        limits = MIXED
    differences = {
        column: {
            row.step: _relative(x, y)
            for row, other in pairs
            if (x := row[column]) is not None and (y := other[column]) is not None
        }
        for column in LIMITS[limits]
    }
    num_replicas = {run.options.get("layout", "").rpartition("data")[2] for run in (a, b)}
    if samples and len(num_replicas) > 1:
        del differences["val_loss"]
    return Comparison((a, b), limits, differences)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="run compare", description=__doc__)
    for name in ("first", "second"):
        parser.add_argument(name, metavar="RUN", type=Path, help=f"the {name} run")
    parser.add_argument("--precision", choices=("32", "bf16-mixed"), help="if run.json is missing")
    options = parser.parse_args(arguments)
    try:
        found = compare(read_run(options.first), read_run(options.second), options.precision)
        print(*found.lines(), sep="\n")
    except UserError as error:
        for problem in error.problems:
            print(f"{parser.prog}: {problem}", file=sys.stderr)
        return 2
    return 1 if found.is_bug else 0


if __name__ == "__main__":
    sys.exit(main())
