"""`./run exercise N`: write a part of a Megatron training yourself, and see at once if it is right.

The first call writes a file in which code is missing, or wrong. Fill it in, and call again: the
program runs under the layouts that matter, and its losses are compared with those of one process.
A known mistake is recognized by the numbers that it gives. Without N, the exercises are listed.
"""

import argparse
import difflib
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the project's folder

from exercises import grading
from exercises.blanks import missing, taken_out
from exercises.course import Exercise, edited, read_course
from exercises.grading import Outcome
from megakit.errors import UserError, brief, reading
from megakit.job.script import begin_script


def filled(text: str) -> str:
    """Returns a paragraph in lines of a terminal."""
    return textwrap.fill(" ".join(text.split()), 80, break_on_hyphens=False)


def begin(exercise: Exercise) -> bool:
    """Writes the learner's file, unless it exists; returns whether it was written."""
    if exercise.file.exists():
        return False
    try:
        exercise.file.parent.mkdir(exist_ok=True)
        exercise.file.write_text(exercise.blank)
        done_file(exercise).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{exercise.file}: {error.strerror}. Use a copy of the project that you may write to."
        ) from None
    return True


def listed(course: Sequence[Exercise]) -> Iterator[str]:
    """Yields a line for each exercise."""
    for one in course:
        state = "right" if done_file(one).exists() else "begun" if one.file.exists() else ""
        yield f"{one.number:>2}  {one.title:<60} {state}".rstrip()


def done_file(exercise: Exercise) -> Path:
    """Returns the file that says that an exercise was right."""
    return exercise.file.with_suffix(".right")


def solution(exercise: Exercise) -> Iterator[str]:
    """Yields the code that is missing, or what is to be mended."""
    for line, code in taken_out(exercise.solution, exercise.gaps):
        yield f"{exercise.program}, {'changed' if exercise.adds else f'line {line}'}:\n\n{code}\n"
    given = edited(exercise.solution, exercise.planted).splitlines()
    rows = difflib.unified_diff(given, exercise.solution.splitlines(), lineterm="", n=1)
    yield from (row for row in [*rows][2:] if not row.startswith("@@"))


def told(outcome: Outcome, source: str) -> str:
    """Returns a line: whether a layout's values are right, else what is wrong first."""
    if outcome.error:
        return outcome.error + shown(outcome.where, source)
    step, right = outcome.wrong, outcome.right
    if step is None:
        return f"right, but {outcome.besides}" if outcome.besides else "right"
    if step not in outcome.values or step not in right:
        steps = [
            f"{min(some)} to {max(some)}" if some else "none" for some in (outcome.values, right)
        ]
        return f"prints other steps: {steps[0]}, not {steps[1]}"
    pairs = zip(("loss", "norm"), outcome.values[step], right[step], strict=False)
    cells = [
        f"{name} right" if grading.alike([a], [b]) else f"{name} {a:.7g}, {factor(a, b)} {b:.7g}"
        for name, a, b in pairs
    ]
    return f"from step {step} on: {'; '.join(cells)}"


def shown(where: str, source: str) -> str:
    """Returns lines of a program by their number, with the code of the only one."""
    numbers = [int(word) for word in where.split() if word.isdigit()]
    if len(numbers) != 1:
        return f" ({where})" if where else ""
    return f"\n  {where}: {source.splitlines()[numbers[0] - 1].strip()}"


def factor(value: float, right: float) -> str:
    """Returns how a value and the right one are related, if it is a simple factor."""
    for number in range(2, 1000):
        if grading.alike([value], [number * right]):
            return f"{number} times"
        if grading.alike([number * value], [right]):
            return f"1/{number} of"
    return "not"


def verdict(exercise: Exercise, outcomes: Sequence[Outcome]) -> str:
    """Returns what the learner is told about outcomes that are not all right."""
    wrong = [outcome.wrong for outcome in outcomes]
    if found := grading.diagnose(exercise, outcomes):
        says = "\n".join(filled(one.says) for one in found)
        one = "This is a known mistake" if len(found) == 1 else "One of these gives these numbers"
        return f"{one}:\n{says}\nRead {exercise.reads}."
    if any(outcome.error for outcome in outcomes):
        return "No known mistake gives this error."
    steps = [step for step in wrong if step is not None]
    if not steps:
        return filled(exercise.besides)
    text = "No known mistake gives these numbers."
    right = [one.name for one, step in zip(exercise.layouts, wrong, strict=False) if step is None]
    if right:
        text += (
            f" It is right under: {'; '.join(right)}. What do the others have that this has not?"
        )
    elif min(steps) > 1:
        text += (
            f" Up to step {min(steps) - 1}, they are right: look at what happens after this loss, "
            "from the backward pass to the next step."
        )
    return f"{filled(text)}\nRead {exercise.reads}."


def check(exercise: Exercise, path: Path) -> int:
    """Runs a learner's file, and says what is right; returns the exit status."""
    with reading(path, "Name a file that can be read."):
        source = path.read_text()
    if path == exercise.file:
        done_file(exercise).unlink(missing_ok=True)
    try:
        compile(source, path.name, "exec")
    except SyntaxError as error:
        print(f"Line {error.lineno} of {path.name}: {error.msg}.")
        return 1
    if empty := [*missing(source)]:
        for line, task in empty:
            print(filled(f"Line {line} of {path.name} still raises NotImplementedError: {task}"))
        return 1
    from megakit.testing import Ranks  # imports torch

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CPUs round alike, and there may be one GPU only
    outcomes = []
    with Ranks(4, timeout=grading.LIMIT) as ranks:
        right = grading.right_values(ranks, exercise)
        found = grading.outcomes_of(ranks, exercise, path, right)
        for layout, outcome in zip(exercise.layouts, found, strict=False):
            outcomes.append(outcome)
            print(f"{layout.name:29}{told(outcome, source)}", flush=True)
            for printed in outcome.prints:
                print(f"  {printed}")
    print()
    if any(one.wrong is not None or one.error or one.besides for one in outcomes):
        print(verdict(exercise, outcomes))
        return 1
    print(f"Right. {f'Now read {exercise.after}.' if exercise.after else ''}".rstrip())
    if path == exercise.file:
        done_file(exercise).touch()
    return 0


def renew(course: Sequence[Exercise]) -> None:
    """Makes all known mistakes, and writes the numbers that they give."""
    from megakit.testing import Ranks

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with Ranks(4, timeout=grading.LIMIT) as ranks:
        marks = {
            exercise.name: {
                name: [one.mark for one in outcomes]
                for name, outcomes in grading.measure(ranks, exercise).items()
            }
            for exercise in course
        }
    text = json.dumps(marks, indent=1)
    grading.KNOWN.write_text(re.sub(r"\n {3,}|\n  (?=\])", "", text) + "\n")


def choose(course: Sequence[Exercise], number: str) -> Exercise:
    """Returns the exercise with this number.

    Raises:
        UserError: There is none.
    """
    for exercise in course:
        if str(exercise.number) == number:
            return exercise
    raise UserError(
        f"exercise {brief(number)}: the exercises have the numbers 1 to {len(course)}. "
        "`./run exercise` lists them."
    )


def main() -> int:
    """Runs the command; returns its exit status: 0 right, 1 not yet, 2 wrong options."""
    begin_script()
    parser = argparse.ArgumentParser("run exercise", description=__doc__.partition("\n\n")[2])
    parser.add_argument("number", metavar="N", nargs="?", help="without N, all are listed")
    parser.add_argument("--hint", action="store_true", help="help a little")
    parser.add_argument("--solution", action="store_true", help="show the missing code")
    parser.add_argument("--file", type=Path, help="check this file instead")
    parser.add_argument(
        "--renew", action="store_true", help="make all known mistakes, and write their numbers"
    )
    options = parser.parse_args()
    course = read_course()
    try:
        if options.renew:
            renew(course)
        elif options.number is None:
            print(*listed(course), sep="\n")
        else:
            return do(choose(course, options.number), options)
    except UserError as error:
        print(f"run: {error}", file=sys.stderr)
        return 2
    return 0


def do(exercise: Exercise, options: argparse.Namespace) -> int:
    """Shows, begins or checks an exercise; returns the exit status."""
    if options.hint or options.solution:
        print(filled(exercise.hint) if options.hint else "\n".join(solution(exercise)))
        return 0
    print(f"{exercise.number}. {exercise.title}\n")
    if options.file is None and begin(exercise):
        file = os.path.relpath(exercise.file)
        print(f"{filled(exercise.asks)}\n\nRead {exercise.reads}.\nThe file is {file}.")
        print(f"Then: ./run exercise {exercise.number}, also with --hint or --solution.")
        print(f"It runs your file with {exercise.small}, and with:")
        for one in exercise.layouts:
            print(
                f"  {one.name:29}{one.ranks} process{'es' * (one.ranks > 1)} {one.options}".rstrip()
            )
        return 0
    return check(exercise, (options.file or exercise.file).resolve())


if __name__ == "__main__":
    sys.exit(main())
