"""Reads the exercises, a TOML file each: what is asked, where it runs, which mistakes are known."""

import functools
import importlib
import re
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from exercises.blanks import Gap, imported, lines_of, make_blank, replaced

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
LADDER, GPT, BY_HAND = "ladder/3_megatron.py", "ladder/gpt/3_megatron.py", "exercises/by_hand.py"
#: The program whose values are right: plain PyTorch, or this one itself in one process.
FIRST = {LADDER: "ladder/1_torch.py", GPT: "ladder/gpt/1_torch.py", BY_HAND: BY_HAND}
#: Small trainings, equal for everybody: the digits come with scikit-learn, the text is the license.
SMALL = {
    LADDER: "--dataset digits --batch-size 32 --steps 10",
    BY_HAND: "--dataset digits --batch-size 32 --steps 10 --clip 0.08",
    GPT: "--batch-size 8 --steps 4",
}


class Edit(NamedTuple):
    """A change of a program's text: wherever the old text is, the new one replaces it."""

    old: str
    new: str


class Layout(NamedTuple):
    """One run of a learner's program.

    Attributes:
        name: What the report calls it.
        ranks: Number of processes.
        options: The program's own options.
        steps: The first and the last step that it prints, if these are not all steps.
    """

    name: str
    ranks: int
    options: str = ""
    steps: tuple[int, int] | None = None


class Mistake(NamedTuple):
    """A known mistake, which is recognized by the numbers that it gives, or by its error.

    Attributes:
        name: A few words, by which known_mistakes.json lists its numbers.
        says: What the learner is told.
        edits: What makes the mistake in the solution.
    """

    name: str
    says: str
    edits: list[Edit]


class Exercise(NamedTuple):
    """One exercise.

    Attributes:
        number: Its number, from 1.
        name: The name of its files.
        title: A few words.
        program: The program with the solution, relative to the repository.
        asks: What is asked.
        hint: What `--hint` says.
        reads: Where to read about it.
        after: Where to read afterwards, because it tells the solution.
        layouts: Where the learner's program runs.
        mistakes: The known ones.
        gaps: Places whose code is taken out.
        planted: In place of gaps: the edits of the solution that the learner has to mend.
        adds: Edits of the program that give it what the exercise needs, also in the solution.
        hides: Definitions of the program that have the solution, so other files import them.
        hidden: Places of this program and of others that show the solution in a function.
        small: Options of a small training.
        besides: What is told if all values are right, and yet something is wrong.
    """

    number: int
    name: str
    title: str
    program: str
    asks: str
    hint: str
    reads: str
    layouts: list[Layout]
    mistakes: list[Mistake]
    gaps: list[Gap]
    planted: list[Edit]
    adds: list[Edit]
    hides: list[str]
    hidden: list[Gap]
    small: str
    after: str = ""
    besides: str = ""

    @property
    def solution(self) -> str:
        """The source of the program with the solution."""
        return edited((ROOT / self.program).read_text(), self.adds)

    @property
    def blank(self) -> str:
        """The source of the file that a learner gets; no other exercise's solution is in it."""
        source, calls = make_blank(self.solution, self.gaps), dict[str, str]()
        for one in read_course():
            call, same = f'given("{self.program}", {one.number}', one.program == self.program
            for gap in one.hidden:
                if one.number != self.number and gap.program == self.program:
                    line = f'{gap.gives} = {call}, "{gap.gives}")' if gap.gives else f"{call})"
                    source = replaced(source, gap, line)
            calls |= {n: f'{call}, "{n}")' for n in one.hides if same and n not in self.hides}
            for edit in one.planted if same else ():
                source = source.replace(edit.old, edit.new)
        source = imported(source, calls)
        return re.sub(r"parents\[\d\]", "parents[2]", source)  # from exercises/mine

    @property
    def file(self) -> Path:
        """Where the learner's file is."""
        return FOLDER / "mine" / f"{self.name}.py"


def edited(source: str, edits: Sequence[Edit]) -> str:
    """Returns a source with edits.

    Raises:
        ValueError: An old text is not in the source.
    """
    for edit in edits:
        if edit.old not in source:
            raise ValueError(f"{edit.old}: is not in the program.")
        source = source.replace(edit.old, edit.new)
    return source


def given(program: str, number: int, names: str = "") -> Any:
    """Does what an exercise asks for, so that the files of other exercises do not show it.

    Args:
        program: The program that has the solution.
        number: The exercise.
        names: A class or a function, which is returned. Or what the solution assigns: it runs with
            the caller's variables.
    """
    exercise = read_course()[number - 1]
    if names in exercise.hides:
        module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
        return getattr(module, names)
    caller, source = sys._getframe(1), (ROOT / program).read_text()
    gaps = (gap for gap in exercise.hidden if (gap.program, gap.gives) == (program, names))
    first, last = lines_of(source, next(gaps))
    code = textwrap.dedent("\n".join(source.splitlines()[first:last]))
    variables = caller.f_globals | caller.f_locals
    exec(compile("\n" * first + code, str(ROOT / program), "exec"), variables)
    return eval(names or "None", variables)


@functools.cache
def read_course() -> list[Exercise]:
    """Reads all exercises, in their order."""
    course = []
    for number, path in enumerate(sorted(FOLDER.glob("*.toml")), 1):
        content = tomllib.loads(path.read_text())
        mistakes = [
            Mistake(**row | {"edits": [Edit(**edit) for edit in row["edits"]]})
            for row in content.pop("mistakes")
        ]
        program, gaps = content["program"], content.pop("gaps")
        edits = {key: [Edit(**row) for row in content.pop(key, [])] for key in ("planted", "adds")}
        hidden = [row for row in gaps + content.pop("elsewhere", []) if "gives" in row]
        course.append(
            Exercise(
                number=number,
                name=path.stem,
                layouts=[Layout(**row) for row in content.pop("layouts")],
                gaps=[Gap(**row) for row in gaps],
                hidden=[Gap(**{"program": program, **row}) for row in hidden],
                mistakes=mistakes,
                **{"small": SMALL[program], **edits, **content},
            )
        )
    return course
