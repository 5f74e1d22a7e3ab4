"""Runs the steps of a ladder: `./run ladder N`, or `./run ladder` for all, with a comparison.

`./run ladder N` runs one step, which prints a line `step loss` for each training step. Step 3 also
runs on several processes: `./run ladder 3 --devices 2 --tensor-parallel 2`. `./run ladder` runs all
four, and model_pretrain.py; it prints a table of the losses and draws the curves. Its exit status
is 1 if losses in float32 differ by more than rounding.

`./run ladder gpt` and `./run ladder gpt N` do so with the small GPT in ladder/gpt, under many
layouts. Its lines also have the norm of the gradient: a factor of all gradients shows there at
once, and in the losses late and faintly, because clipping and Adam remove most of it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ladder.programs import LADDERS, Program, steps_of
from megakit.errors import UserError
from megakit.job.command_line import parse_options
from megakit.job.script import begin_script
from mnist.files import DataOptions
from tools.programs import QUIET, hide_gpus, split_ranks, told_by

if TYPE_CHECKING:
    from ladder.gpt.text_samples import GptOptions
    from mnist.samples import LadderOptions

FOLDER = Path("runs/ladder")
#: Largest relative differences of losses, and of norms, that rounding explains in float32.
ROUNDING = (1e-6, 3e-6)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
#: What a program prints, by step: the loss, and with the GPT the norm of the gradient.
Values = dict[int, tuple[float, ...]]


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


def start(log: str, path: Path, ranks: int, arguments: Sequence[str], shows: bool = False) -> str:
    """Runs a program; what the frameworks report goes to a log.

    Args:
        log: Name of the log.
        path: The program.
        ranks: Number of its processes.
        arguments: Its arguments.
        shows: Whether standard output is shown instead of returned.
    """
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{FOLDER}: {error.strerror}. Start the command in another folder."
        ) from None
    launcher = (*TORCHRUN, str(ranks)) if ranks > 1 else ()
    # torchrun, too, lets each process compute with one thread.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **QUIET}
    with (FOLDER / f"{log}.log").open("w+") as errors:
        done = subprocess.run(
            [sys.executable, *launcher, path, *arguments],
            env=environment,
            stdout=None if shows else subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        if done.returncode:
            errors.seek(0)
            print(told_by(errors.read(), path.name, errors.name), file=sys.stderr)
            raise StepFailedError(done.returncode)
    return done.stdout or ""


def run_step(program: Program, arguments: list[str]) -> None:
    """Runs one step of a ladder, and shows what it prints."""
    has_ranks = program.name in ("2_fsdp.py", "3_megatron.py")
    needs_help = {"-h", "--help"} & {*arguments}
    ranks = 1
    data: list[str] = []
    if needs_help:
        arguments = ["--help"]
    else:
        if not program.path.startswith("ladder/gpt"):
            data, arguments = split_data(arguments)
        if has_ranks:
            ranks, arguments = split_ranks(arguments)
    hide_gpus(ranks)
    start(program.file.stem, program.file, ranks, [*arguments, *data], shows=True)
    if needs_help and has_ranks:
        print(
            "\nIt also has --devices INT, the number of processes; by default the smallest that\n"
            "the other options need."
        )


def values_of(
    program: Program, arguments: list[str], options: LadderOptions | GptOptions
) -> Values:
    """Trains, and returns what is printed by step; model_pretrain.py logs every tenth step."""
    log = re.sub(r"\W+", "_", program.name.strip())
    if program.path != "model_pretrain.py":
        own = ["--steps", str(options.steps), "--batch-size", str(options.batch_size)]
        own += program.options.split()
        printed = start(log, program.file, program.ranks, [*own, *arguments])
        rows = (line.split() for line in printed.splitlines())
        return {int(step): tuple(map(float, values)) for step, *values in rows}
    from megakit.training.metrics_csv import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        own = ["--max-steps", str(options.steps), "--global-batch-size", str(options.batch_size)]
        start(log, program.file, 1, [*own, *arguments, "--output-dir", folder])
        rows_of_file = read_metrics(Path(folder, "pretrain", "metrics.csv"))
    return {row.step: (row.train_loss,) for row in rows_of_file if row.train_loss is not None}


def differences(values: Values, first: Values) -> list[float]:
    """Returns the largest relative difference of each value, over the steps that both have."""
    pairs = ([*zip(values[step], first[step], strict=True)] for step in values if step in first)
    columns = zip(*pairs, strict=True)
    return [max(abs(one / other - 1) for one, other in column) for column in columns]


def climb(
    programs: Sequence[Program], options: LadderOptions | GptOptions, arguments: list[str]
) -> int:
    """Runs all programs, and prints a row for each; returns the exit status."""
    hide_gpus(max(program.ranks for program in programs))
    has_norms = hasattr(options, "text")
    shown = sorted({1, (options.steps + 1) // 2, options.steps})
    columns = "".join(f"{f'loss {step}':>13}" for step in shown)
    print(f"{'':28}lines   seconds{columns}   difference{'   of norms' * has_norms}")
    curves: dict[str, dict[int, float]] = {}
    explained, first, failed = True, Values(), []
    for program in programs:
        began = time.perf_counter()
        try:
            values = values_of(program, arguments, options)
        except StepFailedError:  # which has been told
            failed.append(f"{program.file.name} {program.row}".strip())
            values = {}
        seconds = time.perf_counter() - began
        first = values if program.is_first else first
        lines = "" if program.row else str(len(program.file.read_text().splitlines()))
        cells = "".join(
            f"{values[step][0]:13.9f}" if step in values else " " * 13 for step in shown
        )
        cells = cells if values else f"{'failed':>13}"
        found = differences(values, first)
        explained &= all(one <= most for one, most in zip(found, ROUNDING, strict=False))
        written = "".join(f"{one:{width}.1e}" for one, width in zip(found, (13, 11), strict=False))
        print(f"{program.name:28}{lines:>5}{seconds:10.1f}{cells}{written}", flush=True)
        curves[program.name] = {step: loss for step, (loss, *_) in values.items()}
    print(
        "difference: the largest relative difference from the losses of 1_torch.py, over all steps."
    )
    if has_norms:
        print("of norms: that of the gradient's norm.")
    else:
        draw(curves)
        print(f"The curves are in {FOLDER / 'losses.png'}.")
    if failed:
        print(f"Failed: {', '.join(failed)}.", file=sys.stderr)
    if getattr(options, "precision", "32") == "32" and not explained:
        losses, norms = (f"{most:.0e}" for most in ROUNDING)
        others = f", of norms up to {norms}" if has_norms else ""
        print(f"Rounding explains differences up to {losses}{others}.", file=sys.stderr)
        return 1
    return int(bool(failed))


def draw(curves: dict[str, dict[int, float]]) -> None:
    """Draws all losses, and below them the differences from those of plain PyTorch."""
    from matplotlib.figure import Figure

    from mnist.figure_style import figure_style, to_png

    first = curves["1_torch.py"]
    with figure_style():
        figure = Figure(figsize=(7, 6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        for name, losses in curves.items():
            is_logged = len(losses) < len(first)
            above.plot(
                losses.keys(), losses.values(), "o" if is_logged else "-", label=name.strip()
            )
            relative = {n: abs(loss / first[n] - 1) for n, loss in losses.items() if n in first}
            below.plot(
                [*relative], [*relative.values()], "o" if is_logged else ".", label=name.strip()
            )
        above.set_ylabel("training loss")
        above.legend()
        below.set(xlabel="training step", ylabel="relative difference")
        (FOLDER / "losses.png").write_bytes(to_png(figure))


def main() -> int:
    begin_script()
    sys.argv[0] = "./run ladder"
    arguments = sys.argv[1:]
    name = arguments.pop(0) if arguments[:1] == ["gpt"] else ""
    steps = steps_of(LADDERS[name])
    number = arguments[0] if arguments else ""
    try:
        if number and number not in steps and not number.startswith("-"):
            raise UserError(f"{number}: the steps have the numbers 1 to {len(steps)}.")
        # These import torch, which takes seconds.
        from ladder.gpt.text_samples import GptOptions
        from mnist.samples import LadderOptions

        if number in steps:
            run_step(steps[number], arguments[1:])
        else:
            if {"-h", "--help"} & {*arguments}:
                print(__doc__)
            if name:
                gpt = parse_options(GptOptions, arguments)
                return climb(LADDERS[name], gpt, ["--text", str(gpt.text)])
            options = parse_options(LadderOptions, arguments)
            data = [*split_data(arguments)[0], "--precision", options.precision]
            return climb(LADDERS[name], options, data)
    except UserError as error:
        for problem in error.problems:
            print(f"ladder: {problem}", file=sys.stderr)
        return 2
    except StepFailedError as error:
        return int(error.args[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
