"""Makes the file that a learner fills in: a program of the ladder from which code is taken out."""

import ast
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

MARK = "YOUR CODE"
IMPORT = "from exercises.course import given  # what the exercise with a number asks for"


class Gap(NamedTuple):
    """A place of a program whose code the learner writes.

    Attributes:
        place: The function, with the classes and functions around it, such as `Row.forward`.
        task: What to write there, if it is a gap of an exercise.
        first: With what the first statement begins; empty for the function's whole body.
        last: With what the last one begins; by default only one statement is taken out.
        gives: In a function that other exercises need, too: the names that the code assigns.
        program: The program.
    """

    place: str
    task: str = ""
    first: str = ""
    last: str = ""
    gives: str = ""
    program: str = ""


def make_blank(source: str, gaps: Sequence[Gap]) -> str:
    """Returns a program without the code of its gaps, each of which says what is to be written."""
    for gap in gaps:
        task = textwrap.fill(f"{MARK}: {gap.task}", 88, initial_indent="# ", subsequent_indent="# ")
        source = replaced(source, gap, f'{task}\nraise NotImplementedError("{MARK}")')
    return source


def replaced(source: str, gap: Gap, text: str) -> str:
    """Returns a program with a text in place of a gap's code."""
    lines = source.splitlines()
    first, last = lines_of(source, gap)
    indent = " " * (len(lines[first]) - len(lines[first].lstrip()))
    lines[first:last] = [textwrap.indent(text, indent)]
    return "\n".join(lines) + "\n"


def taken_out(source: str, gaps: Sequence[Gap]) -> Iterator[tuple[int, str]]:
    """Yields the code of each gap, with the number of its first line in the program."""
    for gap in gaps:
        first, last = lines_of(source, gap)
        yield first + 1, "\n".join(source.splitlines()[first:last])


def missing(source: str) -> Iterator[tuple[int, str]]:
    """Yields the gaps that are still empty: the number of the line, and what is to be written."""
    task: list[str] = []
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text == f'raise NotImplementedError("{MARK}")':
            yield number, " ".join(task).removeprefix(f"{MARK}: ") or "delete this line."
        is_task = text.startswith("#") and (task or MARK in text)
        task = [*task, text.removeprefix("# ")] if is_task else []


def imported(source: str, calls: Mapping[str, str]) -> str:
    """Returns a program that calls something for some definitions at its top, by their names."""
    lines = source.splitlines()
    body = ast.parse(source).body
    for node in reversed(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in calls:
            first = min(one.lineno for one in (node, *node.decorator_list))
            del lines[first - 1 : (node.end_lineno or 0) + 2]  # two empty lines follow
    last = max(node.end_lineno or 0 for node in body if isinstance(node, ast.ImportFrom))
    lines[last:last] = [IMPORT, "", *(f"{name} = {call}" for name, call in calls.items())]
    return "\n".join(lines) + "\n"


def lines_of(source: str, gap: Gap) -> tuple[int, int]:
    """Returns the index of the first line of a gap's code, and of the line after its last."""
    node: ast.AST = ast.parse(source)
    for name in gap.place.split("."):
        node = next(one for one in ast.walk(node) if getattr(one, "name", None) == name)
    assert isinstance(node, ast.FunctionDef)
    body = node.body[1:] if ast.get_docstring(node) else node.body
    if not gap.first:
        return body[0].lineno - 1, body[-1].end_lineno or 0

    def find(text: str) -> ast.stmt:  # the statement that begins with this text
        return next(
            one
            for one in ast.walk(node)
            if isinstance(one, ast.stmt)
            and (ast.get_source_segment(source, one) or "").startswith(text)
        )

    return find(gap.first).lineno - 1, find(gap.last or gap.first).end_lineno or 0
