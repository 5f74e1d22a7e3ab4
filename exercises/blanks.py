"""Makes the file that a learner fills in: a program of the ladder from which code is taken out."""

import ast
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MARK = "YOUR CODE"


class Gap(NamedTuple):
    """A place of a program whose code the learner writes.

    Attributes:
        place: The function, with the classes and functions around it, such as `Row.forward`.
        task: What to write there.
        first: Text in the first statement that is taken out; empty for the function's whole body.
        last: Text in the last one; by default only one statement is taken out.
    """

    place: str
    task: str
    first: str = ""
    last: str = ""


def make_blank(source: str, gaps: Sequence[Gap]) -> str:
    """Returns a program without the code of its gaps, each of which says what is to be written."""
    lines = source.splitlines()
    for gap in reversed(sorted(gaps, key=lambda gap: lines_of(source, gap)[0])):
        first, last = lines_of(source, gap)
        indent = " " * (len(lines[first]) - len(lines[first].lstrip()))
        task = textwrap.wrap(
            f"{MARK}: {gap.task}", 99, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        lines[first:last] = [*task, f'{indent}raise NotImplementedError("{MARK}")']
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


def imported(source: str, names: Sequence[str], module: str) -> str:
    """Returns a program that imports some of its classes and functions instead of defining them."""
    lines = source.splitlines()
    body = ast.parse(source).body
    for node in reversed(body):
        if getattr(node, "name", None) in names:
            del lines[node.lineno - 1 : (node.end_lineno or 0) + 2]  # two empty lines follow
    last = max(node.lineno for node in body if isinstance(node, ast.ImportFrom))
    lines.insert(last, f"from {module} import {', '.join(names)}  # given")
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

    def find(text: str) -> ast.stmt:  # the smallest statement with this text
        found = [
            one
            for one in ast.walk(node)
            if isinstance(one, ast.stmt) and text in (ast.get_source_segment(source, one) or "")
        ]
        return min(found, key=lambda one: len(ast.get_source_segment(source, one) or ""))

    return find(gap.first).lineno - 1, find(gap.last or gap.first).end_lineno or 0
