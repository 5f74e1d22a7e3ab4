"""Parses the command line of a script, and prints its help text."""

import argparse
import ast
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from megakit.errors import brief
from megakit.job.option_types import flag

OptionsT = TypeVar("OptionsT")


def program() -> str:
    """Returns what the user has typed, without options; `./run` sets the variable."""
    return os.environ.get("MEGAKIT_COMMAND") or Path(sys.argv[0]).name


def parse_options(options_class: type[OptionsT], argv: Sequence[str] | None = None) -> OptionsT:
    """Parses the command line; prints what is wrong with it and exits with status 2.

    A value that cannot be read is reported alone. If all values can be read, the options' method
    `problems` checks them, and all problems are reported together.

    Args:
        options_class: Its fields are the options; the fields' docstrings are the help texts.
        argv: Arguments without the program's name; by default the arguments of this process.
    """
    arguments = sys.argv[1:] if argv is None else argv
    texts = _texts(options_class) if {"-h", "--help"} & {*arguments} else {}
    parser = _parser(options_class, texts)
    parsed, unknown = parser.parse_known_args(arguments)
    options = options_class(**vars(parsed))
    known = [flag(name) for name in vars(options)]
    vars(options)["given"] = frozenset(vars(parsed))  # see `given_of`
    problems: list[str] = getattr(options, "problems", list)()
    for text in unknown[:1]:
        name = re.sub("learning.rate", "lr", text.partition("=")[0])
        near = get_close_matches(name, known, 2, 0.7)
        question = f"Is it {' or '.join(near)}? " if near else ""
        problems.append(f"{brief(text)}: there is no such option. {question}See --help.")
    if problems:
        parser.error("\n".join(problems))
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if {os.environ.get(name, "0") for name in ("RANK", "SLURM_PROCID")} == {"0"}:
            for problem in message.removeprefix("argument ").splitlines():
                print(f"{self.prog}: {problem}", file=sys.stderr)
        sys.exit(2)


def _parser(options_class: type, texts: dict[str, str]) -> _Parser:
    parser = _Parser(
        program(),
        f"{program()} [options]",
        options_class.__doc__,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    hints = get_type_hints(options_class)
    for option in fields(options_class):
        name, hint = flag(option.name), hints[option.name]
        kinds = get_args(hint) or (hint,)  # of a union, or the values of a literal
        add = partial(parser.add_argument, name)
        text = texts.get(option.name, "").replace("%", "%%")
        if kinds[0] is bool:
            add(action="store_true", help=text)
            continue
        if option.default is not None:
            text += f" (default:\N{NO-BREAK SPACE}{option.default})"
        choices = kinds if isinstance(kinds[0], str) else None
        kind = str if choices else kinds[0]
        metavar = None if choices else kind.__name__.upper()
        add(
            type=partial(_read, name, kind),
            choices=choices,
            metavar=metavar,
            help=text,
        )
    return parser


def _read(name: str, kind: Callable[[str], Any], text: str) -> Any:
    """Converts the value of an option to its type."""
    problem = "'': the value is empty."  # of a variable that is not set, for example
    if text:
        try:
            return kind(text)
        except ValueError:
            rule = "a whole number" if kind is int else "a number"
            problem = f"{brief(text)}: has to be {rule}."
    raise argparse.ArgumentError(None, f"{name} {problem}")


def _texts(options_class: type) -> dict[str, str]:
    """Returns the docstrings below the fields; a redefined field may leave its own out."""
    texts: dict[str, str] = {}
    for owner in reversed(options_class.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        for field, below in pairwise(getattr(tree, "body", [])):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return texts
