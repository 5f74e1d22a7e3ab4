"""Commands in the middle of a sentence: their verbs, options, files and names exist.

`test_commands.py` runs the commands of blocks.
"""

import re
import shlex
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.scripts import REPOSITORY, run

INLINE = re.compile(r"`((?:\./run|(?:\.venv/bin/)?python) [^`]+)`")
PAGES = [
    *REPOSITORY.glob("*.md"),
    *REPOSITORY.glob("docs/**/*.md"),
    *REPOSITORY.glob("examples/*/*.md"),
    *REPOSITORY.glob("benchmarks/*.md"),
]
#: A verb of the project that `./run new --from gpt` makes.
FOREIGN_VERBS = {"sample"}
#: Modules of other packages, and verbs whose options are those of other programs.
FOREIGN = {"ipykernel", "tensorboard", "tests", "setup", "notebook"}


def commands() -> list[str]:
    """The commands between backquotes of all pages."""
    return sorted({command for page in PAGES for command in INLINE.findall(page.read_text())})


@cache
def help_of(*words: str) -> str:
    """What a verb of `run` prints for `--help`; without a verb, the list of verbs."""
    return run(REPOSITORY / "run", *words, "--help", VENV=sys.prefix).output()


def problem(command: str) -> str | None:
    """What is wrong with a command; None if nothing is."""
    program, *words = shlex.split(command.partition(" 2>")[0])
    if program == "./run":
        return problem_of_verb(*words)
    if words[0] == "-m":
        known = words[1] in FOREIGN or find_spec(words[1])
        return None if known else f"no module {words[1]}"
    return None if (REPOSITORY / words[0]).is_file() else f"no file {words[0]}"


def problem_of_verb(verb: str, *words: str) -> str | None:
    """What is wrong with `./run VERB words`; None if nothing is."""
    if verb in FOREIGN_VERBS:
        return None
    if not re.search(rf"^  {verb}\b", help_of(), re.MULTILINE):
        return f"no verb {verb}"
    if verb == "benchmarks":
        unknown = [w for w in words if w.islower() and not re.search(rf"\b{w}\b", help_of(verb))]
    elif verb == "tests":
        unknown = [w for w in words if w.startswith("tests/") and not (REPOSITORY / w).exists()]
    elif verb in FOREIGN:
        return None
    else:
        script = "finetune" if verb == "layout" else verb
        unknown = [w for w in words if w.startswith("--") and w not in help_of(script)]
    return f"{verb}: no {', '.join(unknown)}" if unknown else None


def test_commands_are_found() -> None:
    found = commands()
    assert len(found) > 30
    assert "./run tutorial --data-dir PATH" in found


def test_commands_exist() -> None:
    wrong = {command: reason for command in commands() if (reason := problem(command))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("./run fly", "no verb fly"),
        ("./run finetune --wings 2", "finetune: no --wings"),
        ("./run benchmarks flights", "benchmarks: no flights"),
        ("./run tests tests/flights", "tests: no tests/flights"),
        (".venv/bin/python benchmarks/flights.py", "no file benchmarks/flights.py"),
        ("python -m megakit.flights", "no module megakit.flights"),
        ("./run layout finetune --hidden-size 4096", None),
        ("./run pretrain 2>&1 | head -2", None),
    ],
)
def test_a_wrong_command_is_noticed(command: str, reason: str | None) -> None:
    assert problem(command) == reason


def test_pages_exist() -> None:
    assert {Path("README.md"), Path("docs/porting.md")} <= {
        page.relative_to(REPOSITORY) for page in PAGES
    }
