"""The help texts of all verbs: complete, at most 80 columns wide, and without a set-up."""

import re
import sys

import pytest

from tests.run.harness import as_if_set_up, start, write_program
from tests.scripts import REPOSITORY, run

#: Verbs whose help `run` prints itself, and the options in it.
OWN = {
    "tests": {"--all", "--minutes", "--data-dir"},
    "setup": {"--download", "--wheels", "--venv"},
    "tensorboard": {"--logdir", "--port"},
    "notebook": {"--renew", "--no-browser", "--port"},
}
#: Verbs whose help a program of this project prints, and some of its options.
PROGRAMS = {
    "tutorial": {"--fresh", "--seed", "--data-dir"},
    "pretrain": {"--corruption", "--devices", "--data-dir"},
    "finetune": {"--checkpoint", "--num-labels", "--data-dir"},
    "predict": {"--input", "--checkpoint", "--data-dir"},
    "layout": {"--tensor-parallel", "--corruption"},
    "benchmarks": {"--data-dir"},
    "new": {"--from", "--venv"},
}


def check(text: str, options: set[str]) -> None:
    """Fails if a help text is wide or ragged, or lacks an option."""
    assert [line for line in text.splitlines() if len(line) > 80 or line != line.rstrip()] == []
    assert "None" not in text
    listed = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert options <= listed


def test_every_verb_is_tested():
    listed = re.findall(r"^  (\w+) ", run(REPOSITORY / "run").output(), flags=re.MULTILINE)
    assert {*listed} == {*OWN, *PROGRAMS}


def test_the_list_of_verbs():
    check(run(REPOSITORY / "run").output(), {"--all", "--help"})


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("verb", [verb for verb in OWN if verb != "tests"])
def test_help_of_verbs_sets_up_nothing(project, verb, option):
    done = start(project, verb, option, python=None)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: ./run {verb}")
    check(done.stdout, OWN[verb])
    assert not (project / ".venv").exists()


def test_help_of_tests_has_our_options_before_those_of_pytest(project):
    as_if_set_up(project, 'echo $COLUMNS "$@"; echo a line of 82 columns $(printf %059d 0)')
    (project / "tests").mkdir()
    (project / "tests/conftest.py").write_text((REPOSITORY / "tests/conftest.py").read_text())
    done = start(project, "tests", "--help", python=None)
    assert (done.returncode, done.stderr) == (0, "")
    ours, _, theirs = done.stdout.partition("All other options are pytest's:\n\n")
    check(ours, OWN["tests"])
    assert theirs.startswith("80 -m pytest --help\n")
    assert max(map(len, theirs.splitlines())) <= 80


def test_help_of_tests_names_only_options_that_the_project_has(project):
    """A project made by `new` has fewer."""
    as_if_set_up(project, "true")
    done = start(project, "tests", "--help", python=None)
    assert "--all" not in done.stdout
    assert "--minutes" not in done.stdout
    assert "-k WORDS" in done.stdout


def test_a_verb_of_another_project_has_no_help(project):
    (project / "template").rmdir()
    done = start(project, "notebook", "--help", python=None)
    assert (done.returncode, done.stdout) == (2, "")


def test_a_long_title_is_wrapped(project):
    title = "Stage 2: " + " ".join(["show *"] * 30) + ". More."
    (project / "model_show.py").write_text(f'"""{title}"""\n')
    write_program(project.parent / "bin/python3", "exit 1")
    lines = start(project, python=None).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    first = next(number for number, line in enumerate(lines) if line.startswith("  show "))
    assert lines[first + 1].startswith(" " * 15 + "show *")
    assert " ".join(line[15:] for line in lines[first : first + 4]).count("show *") == 30


@pytest.mark.parametrize("verb", PROGRAMS)
def test_help_of_programs(verb):
    """With the project's own environment, and on a wide terminal, too."""
    done = run(REPOSITORY / "run", verb, "--help", VENV=sys.prefix, COLUMNS="200")
    check(done.output(), PROGRAMS[verb])
