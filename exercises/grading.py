"""Runs a learner's program under an exercise's layouts, and compares what it prints."""

import contextlib
import json
import math
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from exercises.course import FIRST, FOLDER, ROOT, SMALL, Exercise, Layout, Mistake, edited

#: The largest relative difference of losses and norms that rounding explains in float32.
ROUNDING = 3e-6
#: Seconds after which a run counts as hanging; most need one or two.
LIMIT = 20.0
HANGS = "it hangs: a rank waits for a call that another one does not make"
UNEQUAL = "the ranks of a group send and expect different sizes: they make different calls"
#: What the programs print: a step, the loss, and maybe a norm.
LINE = re.compile(r"\d+( (-?\d+\.\d{9}|-?inf|nan))+")
#: Lines of its own that are shown of each rank.
PRINTS = 10
KNOWN = FOLDER / "known_mistakes.json"

#: What a program prints, by step: the loss, and with some programs the norm of the gradient.
Values = dict[int, tuple[float, ...]]
#: By what an outcome is recognized: the values of the last step, or the error.
Mark = list[float] | str


class Outcome(NamedTuple):
    """What a program did under a layout.

    Attributes:
        values: What it printed, by step; empty if it failed.
        error: The last line of its traceback, or that it hung; empty if it did not fail.
        where: The line of its own code where this was.
        prints: The first other lines that it printed, each with its rank.
        excess: How many more samples its ranks read than one training has, shared by the replicas.
    """

    values: Values
    error: str = ""
    where: str = ""
    prints: tuple[str, ...] = ()
    excess: int = 0

    @property
    def mark(self) -> Mark:
        """By what it is recognized."""
        if self.error or not self.values:
            return self.error[:100] or "nothing is printed"
        return [*self.values[max(self.values)]]


def train(path: str, arguments: Sequence[str], folder: Path) -> int:
    """Runs a program as one rank of a job; returns how many of the autoencoder's samples it reads.

    What it prints goes to a file of the folder, also if it fails.
    """
    from mnist.samples import TrainingSamples

    os.chdir(folder)
    if "--save" in arguments:
        from megakit.runtime.writer_threads import write_in_threads

        write_in_threads()  # Megatron's writers are processes that would import the program again
    read, reads = TrainingSamples.__getitem__, 0

    def read_and_count(samples: TrainingSamples, some: slice) -> Any:
        nonlocal reads
        reads += some.stop - some.start
        return read(samples, some)

    TrainingSamples.__getitem__ = read_and_count  # type: ignore[method-assign]
    sys.argv = [path, *arguments]
    path_of_prints = Path(f"prints-{os.environ['RANK']}")
    with path_of_prints.open("w") as prints, contextlib.redirect_stdout(prints):
        runpy.run_path(path, run_name="__main__")
    return reads


def run(ranks: Any, path: Path, options: str, number: int) -> Outcome:
    """Runs a program on some ranks of a pool, in the folder where its checkpoint is."""
    from megakit.testing import RankError

    try:
        reads = ranks.run(train, str(path), options.split(), Path.cwd(), world_size=number)
    except RankError as error:
        return failure(str(error), path)._replace(prints=read_prints(number)[1])
    values, prints = read_prints(number)
    shared = math.prod(map(int, re.findall(r"--(?:tensor|pipeline)-parallel (\d+)", options)))
    batch = int(re.findall(r"--batch-size (\d+)", options)[0])
    excess = sum(reads) // shared - len(values) * batch if any(reads) else 0
    return Outcome(values, prints=prints, excess=excess)


def read_prints(number: int) -> tuple[Values, tuple[str, ...]]:
    """Returns the values that the ranks of a job printed, and their other lines."""
    values, others = Values(), dict[int, list[str]]()
    for rank in range(number):
        path = Path(f"prints-{rank}")
        for line in path.read_text().splitlines() if path.exists() else ():
            if LINE.fullmatch(line):
                step, *numbers = line.split()
                values[int(step)] = tuple(map(float, numbers))
            else:
                others.setdefault(rank, []).append(f"rank {rank}: {line}")
        path.unlink(missing_ok=True)
    return values, tuple(line for lines in others.values() for line in lines[:PRINTS])


def failure(report: str, path: Path) -> Outcome:
    """Returns what a rank's report says: the error, and the program's innermost line."""
    lines = report.strip().splitlines()
    own = re.findall(rf'File "{re.escape(str(path))}", line (\d+)', report)
    if "Timeout (" in report or "gave no result" in report:  # its traceback begins inside
        threads = report.split("Timeout (")[1:]
        waits = [re.findall(rf'File "{re.escape(str(path))}", line (\d+)', one) for one in threads]
        return Outcome({}, HANGS, " and ".join(f"line {one[0]}" for one in waits if one))
    if "enforce fail" in report:
        return Outcome({}, UNEQUAL)
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return Outcome({}, (errors or lines)[-1], f"line {own[-1]}" if own else "")


def right_values(ranks: Any, exercise: Exercise) -> Values:
    """Returns the values of plain PyTorch, or of the exercise's program in one process."""
    path = ROOT / FIRST[exercise.program]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return run(ranks, path, SMALL[exercise.program], 1).values


def outcomes_of(ranks: Any, exercise: Exercise, path: Path) -> Iterator[Outcome]:
    """Yields what a program does under each layout of its exercise, until it hangs."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for layout in exercise.layouts:
            options = f"{SMALL[exercise.program]} {layout.options}"
            outcome = run(ranks, path, options, layout.ranks)
            yield outcome
            if outcome.error == HANGS:
                return


def expected(right: Values, layout: Layout) -> Values:
    """Returns what a layout has to print: a training that loads prints the second half only."""
    first = len(right) // 2 if "--load" in layout.options else 0
    return {step: values for step, values in right.items() if step > first}


def first_wrong(values: Values, right: Values) -> int | None:
    """Returns the first step with other values, None for none; one that lacks counts as other."""
    for step in sorted(values.keys() | right.keys()):
        if step not in values or step not in right or not alike(values[step], right[step]):
            return step
    return None


def alike(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether values agree up to rounding; plain PyTorch may print fewer of them."""
    return all(
        abs(a - b) <= ROUNDING * abs(b) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(some, others, strict=False)
    )


def measure(ranks: Any, exercise: Exercise) -> dict[str, list[Mark]]:
    """Makes each known mistake; returns its mark under each layout, by the name of the mistake."""
    found = {}
    for mistake in exercise.mistakes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{exercise.name}.py")
            path.write_text(edited(exercise.solution, mistake.edits))
            found[mistake.name] = [one.mark for one in outcomes_of(ranks, exercise, path)]
    return found


def diagnose(exercise: Exercise, outcomes: Sequence[Outcome]) -> list[Mistake]:
    """Returns the known mistakes that give these outcomes under all layouts."""
    known: dict[str, list[Mark]] = json.loads(KNOWN.read_text())[exercise.name]
    marks = [outcome.mark for outcome in outcomes]
    found = [one for one in exercise.mistakes if are_alike(marks, known[one.name])]
    # Which rank fails first may differ, and with it the sizes in the error.
    marks, known = without_sizes(marks), {name: without_sizes(some) for name, some in known.items()}
    return found or [one for one in exercise.mistakes if are_alike(marks, known[one.name])]


def without_sizes(marks: Sequence[Mark]) -> list[Mark]:
    """Returns marks whose errors have no numbers."""
    return [re.sub(r"\d+", "N", mark) if isinstance(mark, str) else mark for mark in marks]


def are_alike(marks: Sequence[Mark], others: Sequence[Mark]) -> bool:
    """Whether two programs did the same under all layouts."""
    return len(marks) == len(others) and all(
        one == other if isinstance(one, str) or isinstance(other, str) else alike(one, other)
        for one, other in zip(marks, others, strict=True)
    )
