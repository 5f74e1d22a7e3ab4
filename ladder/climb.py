"""Runs the steps of the ladder: `./run ladder N`, or `./run ladder` for all, with a comparison.

`./run ladder N` runs one step, which prints a line `step loss` for each training step. Step 3 also
runs on several processes: `./run ladder 3 --devices 2 --tensor-parallel 2`. `./run ladder` runs all
four, and model_pretrain.py; it prints a table of the losses and draws the curves. Its exit status
is 1 if losses in float32 differ by more than rounding.
"""

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megakit.errors import UserError
from megakit.job.command_line import parse_options
from megakit.job.option_types import flag
from megakit.job.script import begin_script
from mnist.files import DataOptions
from mnist.samples import LadderOptions

FILES = {path.name[0]: path for path in sorted((ROOT / "ladder").glob("[1-9]_*.py"))}
FOLDER = Path("runs/ladder")
#: Largest relative difference of two losses that rounding explains, in float32.
ROUNDING = 1e-6
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
TWO_RANKS = (*TORCHRUN, "2", FILES["3"])
#: The programs to compare: Python's arguments, by name.
PROGRAMS: dict[str, tuple[str | Path, ...]] = {
    "1_torch.py": (FILES["1"],),
    "2_lightning.py": (FILES["2"],),
    "3_megatron.py": (FILES["3"],),
    "  2 tensor-parallel ranks": (*TWO_RANKS, "--tensor-parallel", "2"),
    "  2 pipeline stages": (*TWO_RANKS, "--pipeline-parallel", "2"),
    "  2 data-parallel ranks": TWO_RANKS,
    "4_nemo.py": (FILES["4"],),
}
LAST = "model_pretrain.py"
#: Variables that keep messages of the frameworks off standard output, or silence them.
QUIET = {"NEMO_REDIRECT_LOGS_TO_STDERR": "1", "PYTHONWARNINGS": "ignore"}
Losses = dict[int, float]


class StepFailedError(Exception):
    """A program ended with this exit status; its output has been printed."""


def split_data(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Finds the images, or downloads them; returns the options for them, and the others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--dataset", choices=["auto", "mnist", "digits"], default="auto")
    data, others = parser.parse_known_args(arguments)
    options = DataOptions(data_dir=data.data_dir, dataset=data.dataset)
    found = ["--dataset", options.fingerprint()]
    if options.data_dir is not None:
        found += ["--data-dir", str(options.data_dir)]
    return found, others


def split_ranks(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns torchrun's arguments for the ranks of step 3, and the step's own arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--devices", "--tensor-parallel", "--pipeline-parallel"):
        parser.add_argument(name, type=int)
    given, others = parser.parse_known_args(arguments)
    sizes = {name: size for name, size in vars(given).items() if size is not None}
    ranks = sizes.pop("devices", math.prod(sizes.values()))
    if given.devices is not None and ranks < 1:
        raise UserError(f"--devices {ranks}: has to be at least 1.")
    others += [part for name, size in sizes.items() for part in (flag(name), str(size))]
    return [*TORCHRUN, str(ranks)] if ranks > 1 else [], others


def start(log: str, *command: str | Path, shows: bool = False) -> str:
    """Runs Python; what the frameworks report goes to a log.

    Args:
        log: Name of the log.
        command: Python's arguments.
        shows: Whether standard output is shown instead of returned.
    """
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{FOLDER}: {error.strerror}. Start the command in another folder."
        ) from None
    # torchrun, too, lets each process compute with one thread.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **QUIET}
    with (FOLDER / f"{log}.log").open("w+") as errors:
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            stdout=None if shows else subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        if done.returncode:
            errors.seek(0)
            text = errors.read()
            if problems := re.findall(rf"^{re.escape(log)}\.py: (.*)", text, re.MULTILINE):
                raise UserError(problems)
            print(told_by(text, log), file=sys.stderr)
            raise StepFailedError(done.returncode)
    return done.stdout or ""


def told_by(text: str, log: str) -> str:
    """Returns what a person has to know of the log of a program that failed."""
    lines = text.splitlines()
    errors = [
        line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)
    ]
    report = f"The traceback is in {FOLDER / log}.log."
    return f"{errors[0]}\n{report}" if errors else text


def losses_of(name: str, options: LadderOptions, data: list[str]) -> Losses:
    """Trains, and returns the losses by step; model_pretrain.py logs every tenth step."""
    common = ["--precision", options.precision, *data]
    if name != LAST:
        own = ["--steps", str(options.steps), "--batch-size", str(options.batch_size)]
        printed = start("_".join(name.split()), *PROGRAMS[name], *common, *own)
        return {int(step): float(loss) for step, loss in map(str.split, printed.splitlines())}
    from megakit.training.metrics_csv import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        own = ["--max-steps", str(options.steps), "--global-batch-size", str(options.batch_size)]
        start(name, ROOT / name, *common, *own, "--output-dir", folder)
        rows = read_metrics(Path(folder, "pretrain", "metrics.csv"))
    return {row.step: row.train_loss for row in rows if row.train_loss is not None}


def difference(losses: Losses, first: Losses) -> float:
    """Returns the largest relative difference at the steps that both have."""
    return max(abs(loss / first[step] - 1) for step, loss in losses.items())


def climb(options: LadderOptions, data: list[str]) -> int:
    """Runs all programs, and prints a row for each; returns the exit status."""
    shown = sorted({1, (options.steps + 1) // 2, options.steps})
    columns = "".join(f"{f'loss {step}':>13}" for step in shown)
    print(f"{'':28}lines   seconds{columns}   difference")
    curves: dict[str, Losses] = {}
    for name in (*PROGRAMS, LAST):
        began = time.perf_counter()
        curves[name] = losses = losses_of(name, options, data)
        seconds = time.perf_counter() - began
        file = FILES.get(name[0], ROOT / name)
        lines = "" if name.startswith(" ") else str(len(file.read_text().splitlines()))
        cells = "".join(f"{losses[step]:13.9f}" if step in losses else " " * 13 for step in shown)
        largest = difference(losses, curves["1_torch.py"])
        print(f"{name:28}{lines:>5}{seconds:10.1f}{cells}{largest:13.1e}", flush=True)
    largest = max(difference(losses, curves["1_torch.py"]) for losses in curves.values())
    draw(curves)
    print(
        "difference: the largest relative difference from the losses of 1_torch.py, over all "
        f"steps.\nThe curves are in {FOLDER / 'losses.png'}."
    )
    if options.precision == "32" and largest > ROUNDING:
        print(f"Rounding explains differences up to {ROUNDING:.0e}.", file=sys.stderr)
        return 1
    return 0


def draw(curves: dict[str, Losses]) -> None:
    """Draws all losses, and below them the differences from those of plain PyTorch."""
    from matplotlib.figure import Figure

    from mnist.figure_style import figure_style, to_png

    first = curves["1_torch.py"]
    with figure_style():
        figure = Figure(figsize=(7, 6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        for name, losses in curves.items():
            style = "o" if name == LAST else "-"
            above.plot(losses.keys(), losses.values(), style, label=name.strip())
            relative = [abs(loss / first[step] - 1) for step, loss in losses.items()]
            below.plot(losses.keys(), relative, "o" if name == LAST else ".", label=name.strip())
        above.set_ylabel("training loss")
        above.legend()
        below.set(xlabel="training step", ylabel="relative difference")
        (FOLDER / "losses.png").write_bytes(to_png(figure))


def main() -> int:
    begin_script()
    sys.argv[0] = "./run ladder"
    number, *others = sys.argv[1:] or [""]
    try:
        if number in FILES:
            needs_help = {"-h", "--help"} & {*others}
            data, others = ([], ["--help"]) if needs_help else split_data(others)
            launcher, others = split_ranks(others) if number == "3" else ([], others)
            start(FILES[number].stem, *launcher, FILES[number], *others, *data, shows=True)
            if needs_help and number == "3":
                print(
                    "\n./run ladder 3 also has --devices INT, the number of processes; by default"
                )
                print("the product of --tensor-parallel and --pipeline-parallel.")
        elif number and not number.startswith("-"):
            raise UserError(f"{number}: the steps have the numbers 1 to 4.")
        else:
            if {"-h", "--help"} & {*sys.argv}:
                print(__doc__)
            options = parse_options(LadderOptions)
            return climb(options, split_data(sys.argv[1:])[0])
    except UserError as error:
        for problem in error.problems:
            print(f"ladder: {problem}", file=sys.stderr)
        return 2
    except StepFailedError as error:
        return int(error.args[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
