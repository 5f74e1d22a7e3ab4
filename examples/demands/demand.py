"""`./run demand N`: runs an experiment of docs/concepts.md, with and without what is demanded.

Each file `demand_NN_*.py` is one experiment. Its docstring has the title, the question, the answer
and a change to try. Its functions `with_*` and `without_*` are the runs, on two ranks each. The
result of a run is what the function returns, or the error that it raises.
"""

import argparse
import ast
import importlib
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project's folder

from megakit.errors import UserError, brief
from megakit.job.script import begin_script


@dataclass(frozen=True)
class Run:
    """One run of an experiment.

    Attributes:
        module: Name of the experiment's file.
        name: Name of the function.
        what: What is trained, and what is observed.
    """

    module: str
    name: str
    what: str

    def result(self, ranks: Any) -> str:
        """Trains on two ranks of a pool; returns the line that docs/concepts.md shows."""
        from megakit.testing import RankError

        with tempfile.TemporaryDirectory() as folder:
            try:
                answers = ranks.run(observe, self.module, self.name, folder, world_size=2)
            except RankError as error:  # a C++ library ended the process, and told the log
                answers = re.findall(r"enforce fail at .*?\] (.*)", str(error))[:1]
                if not answers:
                    raise
        if len({*answers}) > 1:
            answers = [f"{answer} on rank {rank}" for rank, answer in enumerate(answers)]
        else:
            answers = answers[:1]
        return f"{self.name.partition('_')[0] + ':':8} {', '.join(answers)}"


@dataclass(frozen=True)
class Demand:
    """One experiment.

    Attributes:
        path: Its file.
        title: That of its section in docs/concepts.md.
        texts: The question, the answer and a change to try.
        runs: What it trains.
    """

    path: Path
    title: str
    texts: list[str]
    runs: list[Run]


def observe(module: str, name: str, folder: str) -> str:
    """Runs in each rank: calls a function of an experiment; returns its result or its error."""
    os.chdir(folder)
    try:
        result: str = getattr(importlib.import_module(f"examples.demands.{module}"), name)()
    except Exception as error:
        result = textwrap.shorten(f"{type(error).__name__}: {error}", 220, placeholder=" ...")
    return result


def read_demands() -> list[Demand]:
    """Reads the files of the experiments without the frameworks that they import."""
    demands = []
    for path in sorted(Path(__file__).parent.glob("demand_*.py")):
        tree = ast.parse(path.read_text())
        title, *texts = (ast.get_docstring(tree) or "").split("\n\n")
        runs = [
            Run(path.stem, node.name, ast.get_docstring(node) or "")
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith(("with_", "without_"))
        ]
        demands.append(Demand(path, title.removesuffix("."), texts, runs))
    return demands


def say(text: str = "") -> None:
    """Writes to standard error what only a person needs."""
    print(text, file=sys.stderr, flush=True)


def show(demand: Demand) -> Iterator[str]:
    """Asks the question, does the runs and yields their results, and gives the answer."""
    question, answer, change = demand.texts
    say(f"{demand.title}\n\n{question}\n")
    if sys.stdin.isatty():
        say("Press Enter to see.")
        sys.stdin.readline()
    from megakit.testing import Ranks  # imports torch

    with Ranks(2) as ranks:
        for run in demand.runs:
            say(run.what)
            yield run.result(ranks)
    say(f"\n{answer}\n\n{change}")
    say(f"The file is {demand.path}. The section of docs/concepts.md has the same title.")


def choose(demands: list[Demand], number: str) -> Demand:
    """Returns the demand with this number."""
    try:
        return {str(n): demand for n, demand in enumerate(demands, start=1)}[number]
    except KeyError:
        raise UserError(
            f"demand {brief(number)}: the demands have the numbers 1 to {len(demands)}. "
            "`./run demand` lists them."
        ) from None


def main() -> int:
    """Runs the command; returns its exit status."""
    begin_script()
    parser = argparse.ArgumentParser(
        "run demand", description="Repeats one of the twelve experiments of docs/concepts.md."
    )
    parser.add_argument("number", metavar="N", nargs="?", help="1 to 12; without N, lists them")
    number = parser.parse_args().number
    try:
        demands = read_demands()
        lines = (d.title for d in demands) if number is None else show(choose(demands, number))
        for line in lines:
            print(line, flush=True)
    except UserError as error:
        say(f"run: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
