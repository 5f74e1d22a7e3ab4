"""Reads the exercises, a TOML file each: what is asked, where it runs, which mistakes are known."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exercises.blanks import Gap, imported, make_blank

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


@dataclass(frozen=True)
class Edit:
    """A change of a program's text: wherever the old text is, the new one replaces it."""

    old: str
    new: str


@dataclass(frozen=True)
class Layout:
    """One run of a learner's program.

    Attributes:
        name: What the report calls it.
        ranks: Number of processes.
        options: The program's own options.
    """

    name: str
    ranks: int
    options: str = ""


@dataclass(frozen=True)
class Mistake:
    """A known mistake, which is recognized by the numbers that it gives, or by its error.

    Attributes:
        name: A few words, by which known_mistakes.json lists its numbers.
        says: What the learner is told.
        edits: What makes the mistake in the solution.
    """

    name: str
    says: str
    edits: list[Edit]


@dataclass(frozen=True)
class Exercise:
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
        given: Classes and functions that the learner's file imports from the program.
        layouts: Where the learner's program runs.
        mistakes: The known ones.
        gaps: Places whose code is taken out.
        planted: In place of gaps: the edits of the solution that the learner has to mend.
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
    after: str = ""
    given: tuple[str, ...] = ()

    @property
    def solution(self) -> str:
        """The source of the program with the solution."""
        return (ROOT / self.program).read_text()

    @property
    def blank(self) -> str:
        """The source of the file that a learner gets."""
        source = make_blank(self.solution, self.gaps)
        if self.given:
            module = self.program.removesuffix(".py").replace("/", ".")
            source = imported(source, self.given, module)
        source = edited(source, self.planted)
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


def read_course() -> list[Exercise]:
    """Reads all exercises, in their order."""
    course = []
    for number, path in enumerate(sorted(FOLDER.glob("*.toml")), 1):
        content = tomllib.loads(path.read_text())
        mistakes = [
            Mistake(row["name"], row["says"], [Edit(**edit) for edit in row["edits"]])
            for row in content.pop("mistakes")
        ]
        course.append(
            Exercise(
                number=number,
                name=path.stem,
                layouts=[Layout(**row) for row in content.pop("layouts")],
                gaps=[Gap(**row) for row in content.pop("gaps", [])],
                planted=[Edit(**row) for row in content.pop("planted", [])],
                mistakes=mistakes,
                **content,
            )
        )
    return course
