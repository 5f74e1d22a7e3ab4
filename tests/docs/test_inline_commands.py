"""Commands that pages name: their verbs, options, files and modules exist.

`test_commands.py` runs the commands of blocks, which takes long.
"""

import re
import shlex
import sys
from functools import cache
from importlib.util import find_spec

from tests.docs.test_commands import BLOCK, lines_of, pages
from tests.scripts import REPOSITORY, run

INLINE = re.compile(r"`((?:\./run|(?:\.venv/bin/)?python) [^`]+)`")
#: A verb of the project that `./run new --from gpt` makes.
FOREIGN_VERBS = {"sample"}
#: Modules of other packages, and verbs whose options are those of other programs.
FOREIGN = {"ipykernel", "tensorboard", "tests", "setup", "notebook"}


def commands() -> list[str]:
    """The commands between backquotes of all pages, and those of `./run` in blocks."""
    found = set()
    for text in pages().values():
        found |= set(INLINE.findall(text))
        lines = [line for block in BLOCK.findall(text) for line in lines_of(block)]
        found |= {line for line in lines if line.startswith("./run ")}
    return sorted(found)


@cache
def help_of(*words: str) -> str:
    """What a verb of `run` prints for `--help`; without a verb, the list of verbs."""
    return run(REPOSITORY / "run", *words, "--help", VENV=sys.prefix).output()


def problem(command: str) -> str | None:
    """What is wrong with a command; None if nothing is."""
    program, *words = shlex.split(re.split(r" 2>| \|\| | && ", command)[0], comments=True)
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
        known = set(re.findall(r"[\w-]+", help_of(verb)))
        unknown = [w for w in words if w.islower() and w not in known]
    elif verb == "tests":
        unknown = [w for w in words if w.startswith("tests/") and not (REPOSITORY / w).exists()]
    elif verb in FOREIGN or (verb == "layout" and ".py" in " ".join(words)):
        return None  # test_commands.py runs it
    else:
        script = ["finetune" if verb == "layout" else verb]
        if verb == "ladder" and words[:1]:
            script.append(words[0])  # each step has options of its own
        unknown = [w for w in words if w.startswith("--") and w not in help_of(*script)]
    return f"{verb}: no {', '.join(unknown)}" if unknown else None


def test_commands_exist() -> None:
    found = commands()
    assert {"./run predict --input my-digits/", "./run predict --output-dir runs/few"} < {*found}
    assert {command: reason for command in found if (reason := problem(command))} == {}
