"""Parses the command line of a script, and prints its help text."""

import argparse
import ast
import difflib
import inspect
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

from megakit.errors import brief
from megakit.job.option_types import flag, members

OptionsT = TypeVar("OptionsT")


def program() -> str:
    """Returns what the user has typed, without options; `./run` sets the variable."""
    return os.environ.get("MEGAKIT_COMMAND") or Path(sys.argv[0]).name


def parse_options(
    options_class: type[OptionsT], argv: Sequence[str] | None = None, *, checks_values: bool = False
) -> OptionsT:
    """Parses the command line; prints all problems and exits with status 2 if it is invalid.

    Args:
        options_class: Its fields are the options; the fields' docstrings are the help texts.
        argv: Arguments without the program's name; by default the arguments of this process.
        checks_values: Whether to call the options' method `problems`, as the plan of a run does.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    needs_help = bool({"-h", "--help"} & {*arguments})
    texts = _texts(options_class) if needs_help else {}
    parser = _parser(options_class, texts)
    if needs_help:
        parser.print_help()
        sys.exit(0)
    hints = get_type_hints(options_class)
    names: list[str] = [
        field.name for group in _by_owner(options_class).values() for field in group
    ]
    kinds = {flag(name): hints[name] for name in names}
    values: dict[str, Any] = {}
    problems = []
    for name, *given in _groups(arguments):
        shown = brief(" ".join([name, *given]))
        if name not in kinds:
            close = difflib.get_close_matches(name, kinds, 1, cutoff=0.75)
            remedy = f"Is it {close[0]}? See --help." if close else "See --help."
            problems.append(f"{shown}: there is no such option. {remedy}")
        elif given == [""]:
            problems.append(
                f"{name} '': the value is empty. Either a variable is not set, or a command in "
                "$(...) failed; its own message says why. Give a value, or leave the option out."
            )
        else:
            try:  # each option alone, since argparse stops at the first problem
                joined = [f"{name}={given[0]}"] if len(given) == 1 else [name, *given]
                values |= vars(parser.parse_args(joined))
            except ValueError:
                problems.append(f"{shown}: has to be {_in_words(kinds[name])}.")
    options = options_class(**values)
    if problems or checks_values:
        problems += getattr(options, "problems", list)()
    if not problems:
        return options
    if {os.environ.get(name, "0") for name in ("RANK", "SLURM_PROCID")} == {"0"}:
        for problem in problems:
            print(f"{program()}: {problem}", file=sys.stderr)
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class _Formatter(argparse.HelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _parser(options_class: type, texts: Mapping[str, str]) -> argparse.ArgumentParser:
    """Builds the parser, with a heading in the help for each class that introduces options."""
    parser = _Parser(
        program(),
        f"{program()} [options]",
        " ".join((options_class.__doc__ or "").split()),
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_Formatter,
    )
    kinds = get_type_hints(options_class)
    for owner, options in _by_owner(options_class).items():
        title = "Options of this script" if owner is options_class else (owner.__doc__ or "")
        group = parser.add_argument_group(" ".join(title.split()).rstrip("."))
        for option in options:
            text = texts.get(option.name, "").replace("%", "%%")
            kind, *more = [one for one in members(kinds[option.name]) if one is not type(None)]
            if kind is bool:
                group.add_argument(flag(option.name), action="store_true", help=text)
                continue
            if option.default is not None:
                text += f" (default:\N{NO-BREAK SPACE}{option.default})"
            choices = [kind, *more] if isinstance(kind, str) else None
            metavar = None if choices else kind.__name__.removeprefix("Posix").upper()
            reader = str if choices else kind
            group.add_argument(
                flag(option.name), type=reader, choices=choices, metavar=metavar, help=text
            )
    parser.add_argument_group().add_argument("-h", "--help", action="help", help="Show this text.")
    return parser


def _by_owner(options_class: type) -> dict[type, list[Field[Any]]]:
    """Returns the options by the class that introduces them, the script's own options first."""
    owners: dict[type, list[Field[Any]]] = {one: [] for one in options_class.__mro__}
    for field in fields(options_class):
        introduces = [one for one in owners if field.name in vars(one).get("__annotations__", {})]
        owners[introduces[-1]].append(field)
    return {owner: options for owner, options in owners.items() if options}


def _texts(options_class: type) -> dict[str, str]:
    """Returns the docstrings below the fields; a redefined field may leave its own out."""
    texts: dict[str, str] = {}
    for owner in reversed(options_class.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        for field, below in pairwise(getattr(tree, "body", [])):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return texts


def _groups(arguments: Sequence[str]) -> list[list[str]]:
    """Splits the command line into groups: an option, and the values that follow it."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--") or not groups:
            name, is_joined, value = argument.partition("=")
            groups.append([name.replace("_", "-"), *([value] if is_joined else [])])
        else:
            groups[-1].append(argument)
    return groups


def _in_words(kind: Any) -> str:
    """Describes the values of a type in words."""
    kinds = [part for part in members(kind) if part is not type(None)]
    if all(isinstance(part, str) for part in kinds):
        return "one of " + ", ".join(kinds)
    words = {int: "a whole number", float: "a number", bool: "without a value", Path: "one path"}
    return words.get(kinds[0], "one value")
