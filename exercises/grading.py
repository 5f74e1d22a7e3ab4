"""Runs a learner's program under an exercise's layouts, and compares what it prints."""

import contextlib
import io
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
LIMIT = 30.0
HANGS = "it hangs: a rank waits for a call that another one does not make"
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
        where: The lines of its own code in the traceback.
    """

    values: Values
    error: str = ""
    where: str = ""

    @property
    def mark(self) -> Mark:
        """By what it is recognized."""
        if self.error or not self.values:
            return self.error[:100] or "nothing is printed"
        return [*self.values[max(self.values)]]


def train(path: str, arguments: Sequence[str], folder: str) -> str:
    """Runs a program as one rank of a job; returns what it prints."""
    os.chdir(folder)
    if "--save" in arguments:
        from megakit.runtime.writer_threads import write_in_threads

        write_in_threads()  # Megatron's writers are processes that would import the program again
    sys.argv = [path, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def run(ranks: Any, path: Path, options: str, number: int, folder: str) -> Outcome:
    """Runs a program on some ranks of a pool, in a folder for its checkpoint."""
    from megakit.testing import RankError

    try:
        printed = ranks.run(train, str(path), options.split(), folder, world_size=number)
    except RankError as error:
        return failure(str(error), path)
    rows = (line.split() for line in "".join(printed).splitlines())
    try:
        values = {int(step): tuple(map(float, found)) for step, *found in rows}
    except ValueError:
        return Outcome({}, "it prints other lines than `step loss` or `step loss norm`.")
    return Outcome(values)


def failure(report: str, path: Path) -> Outcome:
    """Returns what a rank's traceback says: the error, and the lines of the program itself."""
    lines = report.strip().splitlines()
    own = re.findall(rf'File "{re.escape(str(path))}", line (\d+)', report)
    where = f"line {', '.join(dict.fromkeys(own))} of {path.name}" if own else ""
    if "Timeout (" in report or "gave no result" in report:
        return Outcome({}, HANGS, where)
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return Outcome({}, (errors or lines)[-1], where)


def right_values(ranks: Any, exercise: Exercise) -> Values:
    """Returns the values of plain PyTorch, or of the exercise's program in one process."""
    path = ROOT / FIRST[exercise.program]
    return run(ranks, path, SMALL[exercise.program], 1, str(ROOT)).values


def outcomes_of(ranks: Any, exercise: Exercise, path: Path) -> Iterator[Outcome]:
    """Yields what a program does under each layout of its exercise, until it hangs."""
    with tempfile.TemporaryDirectory() as folder:
        for layout in exercise.layouts:
            options = f"{SMALL[exercise.program]} {layout.options}"
            outcome = run(ranks, path, options, layout.ranks, folder)
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
    return [mistake for mistake in exercise.mistakes if are_alike(marks, known[mistake.name])]


def are_alike(marks: Sequence[Mark], others: Sequence[Mark]) -> bool:
    """Whether two programs did the same under all layouts."""
    return len(marks) == len(others) and all(
        one == other if isinstance(one, str) or isinstance(other, str) else alike(one, other)
        for one, other in zip(marks, others, strict=True)
    )
