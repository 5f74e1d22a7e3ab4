"""The verbs of `run`: what each calls, and what is refused."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.refusals import CLOSED_PROXY
from tests.run.conftest import BASE_PYTHON, as_if_set_up, start, write_program
from tests.scripts import REPOSITORY, run

VERBS = (
    "tutorial tests pretrain finetune predict check trace layout compare tensorboard notebook "
    "ladder exercise experiment benchmarks new setup"
)


def test_help_lists_the_verbs_and_sets_up_nothing(project):
    for arguments in ((), ("--help",), ("setup", "--help")):
        done = start(project, *arguments, python=None)
        assert (done.returncode, done.stderr) == (0, "")
        assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
        expected = "dev download wheels venv" if arguments[:1] == ("setup",) else VERBS
        found = re.findall(r"^  (?:--)?(\w+) ", done.stdout, flags=re.MULTILINE)
        assert found == expected.split()
    assert not (project / ".venv").exists()


#: What needs no package, and its exit status.
ANSWERED = {
    **dict.fromkeys(("new --help", "help new", "pretrain -h", "predict --help", "tutorial -h"), 0),
    **dict.fromkeys(("exercise --help", "experiment --help"), 0),
    **dict.fromkeys(("new", "new a b", "ladder 7", "ladder gpt 9 --steps 2"), 2),
}


@pytest.mark.parametrize("command", ANSWERED)
def test_help_and_refusals_before_anything_is_set_up(command, tmp_path):
    """Any Python gives the answers that the environment gives."""
    answers = []
    path = f"{Path(BASE_PYTHON).parent}:{os.environ['PATH']}"
    for venv in (str(tmp_path / "venv"), sys.prefix):
        call = (REPOSITORY / "run", *command.split())
        answers.append(run(*call, VENV=venv, PATH=path, https_proxy=CLOSED_PROXY, COLUMNS="80"))
        assert not (tmp_path / "venv").exists()
    assert answers[0] == answers[1]
    assert answers[0].status == ANSWERED[command]


def test_a_python_without_packages_is_told_where_they_are():
    """`-S` leaves the packages out."""
    done = run(sys.executable, "-S", REPOSITORY / "model_pretrain.py")
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert "the packages are missing in this Python" in done.err
    assert ".venv/bin/python, or ./run, which" in done.err


CALLS = {
    "tutorial --seed 1": "<root>/mnist/tutorial.py|--seed|1",
    "trace gpt --devices 8": "-P|-m|tools.trace|gpt|--devices|8",
    "layout --devices 8": ("-P|-m|tools.layout|<root>/model_pretrain.py|--devices|8"),
    "layout finetune": "-P|-m|tools.layout|<root>/model_finetune.py",
    "check a.py --layouts SP": "-P|-m|tools.check|a.py|--layouts|SP",
    "compare a b": "-P|-m|tools.compare|a|b",
    "tensorboard --port 1": "-W|ignore|-P|-m|tensorboard.main|--logdir|runs|--port|1",
    "notebook --no-browser": (
        "-P|-m|notebook|--ServerApp.root_dir=<root>"
        "|--JupyterNotebookApp.default_url=/notebooks/notebooks/mnist_megatron.ipynb"
        f"{'' if os.geteuid() else '|--allow-root'}|--no-browser"
    ),
    "ladder 3": "<root>/ladder/climb.py|3",
    "exercise 4": "<root>/exercises/exercise.py|4",
    "experiment 4": "<root>/experiments/experiment.py|4",
    "benchmarks data": "<root>/benchmarks/run_all.py|data",
    "new ../mine": "<root>/template/new.py|../mine",
    "help predict": "<root>/model_predict.py|--help",
    "tests -k a": "-m|pytest|-n|auto|--dist|loadfile|--no-loadscope-reorder|-k|a",
}


def test_verbs_call_what_they_stand_for_in_the_folder_of_the_caller(project, tmp_path):
    """Only pytest runs in the project, where its settings are; `-P` keeps modules of others out."""
    as_if_set_up(project, "IFS='|'; echo \"$PWD:$MEGAKIT_COMMAND:$*\"")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for command, called in CALLS.items():
        done = start(project, *command.split(), cwd=elsewhere, python=None)
        verb = command.removeprefix("help ").split()[0]
        folder = "<root>" if verb == "tests" else elsewhere
        name = "" if verb in ("tests", "notebook") else f"run {verb}"
        assert done.stdout.replace(str(project), "<root>") == f"{folder}:{name}:{called}\n"
        assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("notbook",), "no verb 'notbook' in this project. Did you mean notebook? ./run alone"),
        (("prediction",), "'prediction' in this project. Did you mean pretrain or predict? ./run"),
        (("help", "fit"), "no verb 'fit' in this project. ./run alone lists those it has\n"),
        (("[*",), "no verb '[*' in this project. ./run alone"),
        (("components",), "no verb 'components' in this project."),
    ],
    ids=str,
)
def test_an_unknown_verb_is_refused_with_those_that_begin_like_it(project, arguments, told):
    done = start(project, *arguments, python=None)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("asked", "is_as_asked"), [("3.12", 1), ("3.11", 0), ("12.3", 0)])
def test_what_is_set_up_serves_only_the_python_that_is_asked_for(project, asked, is_as_asked):
    as_if_set_up(project, "echo ran")
    if not asked.startswith("3"):
        asked = write_program(project.parent / "python", f"echo Python 3.{asked}")
    done = start(project, "predict", python=asked)
    assert ("ran" in done.stdout) == is_as_asked
    assert (done.returncode == 0) == is_as_asked
