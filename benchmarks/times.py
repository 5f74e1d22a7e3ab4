"""From Enter to result: what users wait for, and the memory it takes.

    python benchmarks/times.py --data-dir PATH [--runs 5] [--write]

Processes as a user starts them, none of them changed. The first step's end is when the first row of
metrics.csv is there; the last step's is when its row was written, after its validation and before
its save. `--write` puts the table into RESULTS.md.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from report import REPOSITORY, Row, parser_of, publish

SCRIPTS = ("model_pretrain.py", "model_finetune.py", "model_predict.py")
STAGES = ("pretrain", "finetune", "predict")
LOOK_EVERY = 0.004


@dataclass
class Done:
    """A process that has ended.

    Attributes:
        began: When it was started, by `time.time()`.
        ended: When it ended.
        megabytes: The most memory that it, or a process of its own, held at a time.
        first_row: When metrics.csv got its first row, or None.
    """

    began: float
    ended: float
    megabytes: float
    first_row: float | None

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def run(command: list[object], folder: Path, metrics: Path | None = None) -> Done:
    """Runs a process to its end, looking now and then whether metrics.csv has a row."""
    with tempfile.TemporaryFile("w+") as err:
        began = time.time()
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=folder,
            env={**os.environ, "VENV": sys.prefix},
            stdout=subprocess.DEVNULL,
            stderr=err,
        )
        first_row = None
        while metrics is not None and first_row is None and process.returncode is None:
            time.sleep(LOOK_EVERY)
            if metrics.exists() and metrics.read_bytes().count(b"\n") > 1:
                first_row = time.time()
            elif os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
        _, status, usage = os.wait4(process.pid, 0)
        ended = time.time()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            err.seek(0)
            sys.exit(f"{command} failed:\n{err.read()[-4000:]}")
        return Done(began, ended, usage.ru_maxrss / 1024, first_row)


def accuracy(runs: Path) -> float:
    """Percent of predictions that are right."""
    lines = (runs / "predict" / "predictions.csv").read_text().splitlines()[1:]
    cells = [line.split(",")[1:3] for line in lines]
    return 100 * statistics.mean(label == prediction for label, prediction in cells)


class Figures:
    """Values by what was measured, in the order of their first appearance."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], list[float]] = {}

    def add(self, what: str, value: float, unit: str = "s") -> None:
        self.values.setdefault((what, unit), []).append(value)

    def rows(self, notes: dict[str, str]) -> list[Row]:
        return [
            Row(what, values, unit, notes.get(what, ""))
            for (what, unit), values in self.values.items()
        ]


def phases(whole: Done, runs: Path) -> Iterator[tuple[str, float]]:
    """Yields the phases of `./run tutorial`; `other` of pretrain is mostly the imports."""
    began = whole.began
    for stage in STAGES:
        summary = runs / stage / "summary.json"
        times = json.loads(summary.read_text())["times"] or {}
        ended = whole.ended if stage == STAGES[-1] else summary.stat().st_mtime
        yield from ((f"{stage}, {name}", seconds) for name, seconds in times.items())
        yield f"{stage}, other", ended - began - sum(times.values())
        began = ended


def measure(figures: Figures, data_dir: Path, folder: Path) -> None:
    """The three scripts with 500 steps each, --help, a run of one step, and the whole tutorial."""
    common = ["--data-dir", data_dir, "--output-dir"]
    runs = folder / "runs"
    done = {}
    for script, stage in zip(SCRIPTS, STAGES, strict=True):
        steps = [] if stage == "predict" else ["--max-steps", 500]
        metrics = runs / stage / "metrics.csv" if steps else None
        command = [sys.executable, REPOSITORY / script, *common, runs, *steps]
        done[stage] = ended = run(command, folder, metrics)
        figures.add(f"{script}, whole process", ended.seconds)
        figures.add(f"{script}, peak memory", ended.megabytes, "MB")
        if metrics is None:
            continue
        if ended.first_row is None:
            sys.exit(f"{script}: metrics.csv had no row before the end")
        figures.add(f"{script}, start to end of the first step", ended.first_row - ended.began)
        figures.add(f"{script}, last step to prompt", ended.ended - metrics.stat().st_mtime)
    figures.add("the three scripts", sum(ended.seconds for ended in done.values()))
    for script in SCRIPTS:
        helped = run([sys.executable, REPOSITORY / script, "--help"], folder)
        figures.add("--help", helped.seconds)
    one = [sys.executable, REPOSITORY / SCRIPTS[0], *common, folder / "one", "--max-steps", 1]
    figures.add("a run of one step, whole process", run(one, folder).seconds)
    whole = run([REPOSITORY / "run", "tutorial", *common, folder / "tutorial"], folder)
    figures.add("./run tutorial", whole.seconds)
    for phase, seconds in phases(whole, folder / "tutorial"):
        figures.add(f"./run tutorial: {phase}", seconds)
    figures.add("./run tutorial, test accuracy", accuracy(folder / "tutorial"), "%")


def main() -> None:
    parser = parser_of("What users wait for.")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    data_dir = options.data_dir.absolute()
    figures = Figures()
    for number in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            measure(figures, data_dir, Path(folder))
        print(f"run {number + 1} done", file=sys.stderr, flush=True)
    notes = {"the three scripts": "500 and 500 steps, other options at their defaults"}
    publish("times", "From Enter to result", figures.rows(notes), options.write)


if __name__ == "__main__":
    main()
