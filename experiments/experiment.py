"""`./run experiment N`: trains with and without demand N.

Each file `NN_*.py` is one experiment. Its docstring has the title, the question, the answer and a
change to try. Its functions `with_*` and `without_*` are the runs, on two ranks each. The result of
a run is what the function returns, or the error that it raises.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project's folder

from megakit.errors import UserError, brief
from megakit.job.script import begin_script


@dataclass(frozen=True)
class Run:
    """One run of an experiment.

    Attributes:
        path: The experiment's file.
        name: Name of the function.
        what: What is trained, and what is observed.
    """

    path: Path
    name: str
    what: str

    def result(self, ranks: Any) -> str:
        """Trains on two ranks of a pool; returns the line that the course shows."""
        from megakit.testing import RankError

        with tempfile.TemporaryDirectory() as folder:
            try:
                answers = ranks.run(observe, str(self.path), self.name, folder, world_size=2)
            except RankError as error:  # a C++ library ended the process, and told the log
                answers = re.findall(r"enforce fail at .*?\] (.*)", str(error))[:1]
                if not answers:
                    raise
        # A rank also fails when its neighbor ends, but only the neighbor's error says why.
        answers = [answer for answer in answers if "by peer" not in answer] or answers
        if len({*answers}) > 1:
            answers = [f"{answer} on rank {rank}" for rank, answer in enumerate(answers)]
        else:
            answers = answers[:1]
        return f"{self.name.partition('_')[0] + ':':8} {', '.join(answers)}"


@dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes:
        path: Its file.
        title: Number and demand.
        texts: The question, the answer and a change to try.
        runs: What it trains.
    """

    path: Path
    title: str
    texts: list[str]
    runs: list[Run]


def observe(path: str, name: str, folder: str) -> str:
    """Runs in each rank: calls a function of an experiment; returns its result or its error."""
    os.chdir(folder)
    sys.path.append(str(Path(path).parent))  # a copy may be anywhere
    try:
        result: str = getattr(importlib.import_module(Path(path).stem), name)()
    except Exception as error:
        result = textwrap.shorten(f"{type(error).__name__}: {error}", 220, placeholder=" ...")
    return result


def read_experiments() -> list[Experiment]:
    """Reads the files of the experiments without the frameworks that they import."""
    experiments = []
    for path in sorted(Path(__file__).resolve().parent.glob("[0-9]*.py")):
        tree = ast.parse(path.read_text())
        title, *texts = (ast.get_docstring(tree) or "").split("\n\n")
        runs = [
            Run(path, node.name, ast.get_docstring(node) or "")
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith(("with_", "without_"))
        ]
        experiments.append(Experiment(path, title.removesuffix("."), texts, runs))
    return experiments


def say(text: str = "") -> None:
    """Writes to standard error what only a person needs."""
    print(text, file=sys.stderr, flush=True)


def show(experiment: Experiment) -> Iterator[str]:
    """Asks the question, does the runs and yields their results, and gives the answer."""
    question, answer, change = experiment.texts
    say(f"{experiment.title}\n\n{question}\n")
    if sys.stdin.isatty():
        say("Press Enter to see.")
        sys.stdin.readline()
    from megakit.testing import Ranks  # imports torch

    with Ranks(2) as ranks:
        for run in experiment.runs:
            say(run.what)
            yield run.result(ranks)
    say(f"\n{answer}\n\n{change}")
    say(f"The file is {experiment.path}.")
    say("The course (docs/course) has the reasons, and the answer to the change.")


def choose(experiments: list[Experiment], number: str) -> Experiment:
    """Returns the experiment with this number."""
    try:
        return {str(n): one for n, one in enumerate(experiments, start=1)}[number]
    except KeyError:
        raise UserError(
            f"experiment {brief(number)}: the experiments have the numbers 1 to "
            f"{len(experiments)}. `./run experiment` lists them."
        ) from None


def main() -> int:
    """Runs the command; returns its exit status."""
    begin_script()
    parser = argparse.ArgumentParser(
        "run experiment",
        description="Trains for two steps with and without one of twelve demands, "
        "and shows what the difference is.",
    )
    parser.add_argument("number", metavar="N", nargs="?", help="1 to 12; without N, lists them")
    number = parser.parse_args().number
    try:
        every = read_experiments()
        lines = (one.title for one in every) if number is None else show(choose(every, number))
        for line in lines:
            print(line, flush=True)
    except UserError as error:
        say(f"run: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
