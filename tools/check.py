"""Says whether a Megatron training is right under every layout, and which weight is not.

    ./run check PROGRAM.py [its options] [--layouts TP2,SP,PP2]
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megakit.errors import UserError

from .judge import Judgement, Step
from .layouts import DEFAULT, Layout, Words, parse_layout
from .ranks import FailedError, prepare_once, redirect, run_ranks
from .recorder import run
from .step_values import StepValues

FOLDER = Path("runs/check")


def record(program: Path, layout: Layout, options: Sequence[str], folder: Path, first: Path | None, steps: int) -> list[Step]:
    """Runs the steps under a layout; returns them."""
    own = folder / layout.name
    own.mkdir()

    def work(rank: int) -> None:
        def make(step: int) -> StepValues:
            return StepValues(own / f"{rank}.{step}.pt", first and first / f"0.{step}.pt")

        run(program, options, own / f"{rank}.json", make, steps)

    logs = FOLDER / layout.name
    logs.mkdir(parents=True, exist_ok=True)
    run_ranks(program, layout.ranks, own, logs, work)
    files = [[own / f"{rank}.{step + 1}.pt" for rank in range(layout.ranks)] for step in range(steps)]
    if not files[0][0].exists():
        raise UserError(f"{program}: makes no training step by Megatron's schedule.")
    return [Step([torch.load(file) for file in of_step]) for of_step in files if of_step[0].exists()]


def help_of(program: Path, folder: Path) -> str:
    """Returns what the program's --help prints."""
    pid = os.fork()
    if not pid:
        redirect(1, folder / "help.txt")
        redirect(2, folder / "help.log")
        import runpy
        sys.argv = [str(program), "--help"]
        try:
            runpy.run_path(str(program), run_name="__main__")
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(pid, 0)
    return (folder / "help.txt").read_text()


def main() -> int:
    parser = argparse.ArgumentParser(prog="check", description=__doc__, allow_abbrev=False)
    parser.add_argument("program", type=Path)
    parser.add_argument("--layouts", default=",".join(DEFAULT))
    parser.add_argument("--layout", action="append", default=[])
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=8)
    mine, options = parser.parse_known_args()
    program = mine.program
    FOLDER.mkdir(parents=True, exist_ok=True)
    prepare_once(program, FOLDER / "start.log")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = Words(help_of(program, folder), dict(one.split("=", 1) for one in mine.layout))
        sizes = [str(x) for n, ws in ((8, ("--global-batch-size", "--batch-size")), (2, ("--micro-batch-size",))) if (w := words.find(ws)) and w not in options for x in (w, n)]
        if words.find(["--precision"]) and "--precision" not in options:
            sizes += ["--precision", "32"]
        if words.find(["--output-dir"]) and "--output-dir" not in options:
            sizes += ["--output-dir", str(folder / "runs")]
        one = Layout("one", {})
        begin = time.time()
        right = record(program, one, [*sizes, *options], folder, None, mine.steps)
        print(f"one process: {time.time()-begin:.1f} s, loss {right[0].loss:.9f}, norm {right[0].ranks[0]['norm']}, {len(right[0].shapes)} weights")
        j = Judgement(right[0], right[0], "one")
        print(f"bound {j.bound:.1e}")
        for f in j.findings: print("   ", f)
        for layout in map(parse_layout, mine.layouts.split(",")):
            if layout.ranks > mine.ranks:
                continue
            begin = time.time()
            try:
                steps = record(program, layout, [*sizes, *options, *words.options(layout)], folder, folder / "one", mine.steps)
            except (UserError, FailedError) as error:
                print(f"{layout.name:14} {type(error).__name__} {str(getattr(error, 'problems', error))[:300]}")
                continue
            for n, (a, b) in enumerate(zip(right, steps, strict=True)):
                j = Judgement(a, b, layout.name)
                print(f"{layout.name:14} {n+1} {layout.ranks} {time.time()-begin:5.1f} s", " ".join(f"{k} {v:.1e}" for k, v in j.differences.items()), "wrong" if j.findings else "right")
                for f in j.findings: print("   ", f)
    return 0


if __name__ == "__main__":
    sys.exit(main())
