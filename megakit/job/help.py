"""Writes the help text of a script from its options class: fields, defaults and docstrings."""

import ast
import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

from megakit.job.ranges import flag

#: Columns of a line at most, and of the flags before the texts.
WIDTH, FLAGS = 80, 24
OWN_HEADING = "Options of this script."
#: Between words that stay on one line.
NO_BREAK = "\N{NO-BREAK SPACE}"
WORDS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}


def format_help(options_class: type, program: str) -> str:
    """Returns the help text, with a heading for each class that introduces options.

    Args:
        options_class: A dataclass. The docstring below a field is the field's text; a redefined
            field without a docstring has the text of the base class.
        program: The program's name.
    """
    width = max(40, min(WIDTH, shutil.get_terminal_size().columns))
    parts = [f"usage: {program} [options]"]
    if description := _docstring(options_class):
        parts.append(textwrap.fill(description, width))
    for owner, fields in _by_owner(options_class):
        heading = OWN_HEADING if owner is options_class else _docstring(owner) or OWN_HEADING
        lines = [_entry(field, options_class, width) for field in fields]
        parts.append("\n".join([textwrap.fill(heading.rstrip(".") + ":", width), *lines]))
    parts.append(_columns("-h, --help", "Show this text.", width))
    return "\n\n".join(parts).replace(NO_BREAK, " ")


def _by_owner(options_class: type) -> Iterator[tuple[type, list[dataclasses.Field[Any]]]]:
    """Yields the options by the class that introduces them, the script's own options first."""
    owners: dict[type, list[dataclasses.Field[Any]]] = {one: [] for one in options_class.__mro__}
    for field in dataclasses.fields(options_class):
        introduces = [one for one in owners if field.name in vars(one).get("__annotations__", {})]
        owners[introduces[-1]].append(field)
    yield from ((owner, fields) for owner, fields in owners.items() if fields)


def _entry(field: dataclasses.Field[Any], options_class: type, width: int) -> str:
    metavar = _metavar(get_type_hints(options_class)[field.name])
    texts = (_field_texts(one).get(field.name) for one in options_class.__mro__)
    text = next(filter(None, texts), "")
    # The text states the meaning of a missing value; a switch is off by default.
    if field.default is not None and not isinstance(field.default, bool):
        text += f" (default:{NO_BREAK}{field.default})"
    return _columns(f"{flag(field.name)} {metavar}".rstrip(), text, width)


def _metavar(kind: Any) -> str:
    """Returns the placeholder of an option's value, without None; empty for a switch."""
    kinds = [part for part in get_args(kind) or (kind,) if part is not type(None)]
    if kinds == [bool]:
        return ""
    if all(isinstance(part, str) for part in kinds):
        return "{" + ",".join(kinds) + "}"
    return WORDS.get(kinds[0], "VALUE")


def _columns(flags: str, text: str, width: int) -> str:
    """Returns flags and text side by side; long flags have a line of their own."""
    lines = textwrap.wrap(text, width - FLAGS, break_on_hyphens=False)
    head = f"  {flags}"
    if len(head) < FLAGS - 1 and lines:
        head = head.ljust(FLAGS) + lines.pop(0)
    return "\n".join([head, *(" " * FLAGS + line for line in lines)])


def _docstring(owner: type) -> str:
    """Returns a class's docstring in one line; not the signature that `dataclass` adds."""
    tree = _source_tree(owner)
    text = ast.get_docstring(tree) if tree else None
    return " ".join((text or "").split())


def _field_texts(owner: type) -> dict[str, str]:
    """Returns the docstrings below the fields of a class, each in one line."""
    tree = _source_tree(owner)
    texts: dict[str, str] = {}
    body = tree.body if tree else []
    for field, below in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            texts[field.target.id] = " ".join(below.value.value.split())
    return texts


@cache
def _source_tree(owner: type) -> ast.ClassDef | None:
    """Returns a class's syntax tree; None for a class without a source file."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return tree if isinstance(tree, ast.ClassDef) else None
