"""Which folder MNIST is read from, and that no command changes the dataset silently."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from model_finetune import FINETUNE, FinetuneOptions
from model_pretrain import PRETRAIN, PretrainOptions
from tests.fabricate import make_run, prepare_run
from tests.mnist.made_up import link_files
from tests.refusals import problem
from tests.scripts import run_script

MINE, EMPTY = Path("mine"), Path("empty")


@pytest.fixture(autouse=True)
def here(
    made_up_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None
) -> Path:
    """The current folder: it has `mine` with MNIST, no `empty` and no `data`. No mirror answers."""
    monkeypatch.chdir(tmp_path)
    link_files(made_up_mnist, tmp_path / MINE / "MNIST" / "raw")
    return tmp_path


def choose(
    option: Path | None = None,
    *,
    dataset: Any = "auto",
    start: str | None = None,
    run: str | None = None,
) -> tuple[str, Path | None, list[str]]:
    """The dataset, the folder that was chosen, and what the user is told."""
    options, said = FinetuneOptions(data_dir=option, dataset=dataset), list[str]()
    vars(options).update(start_dataset=start, run_dataset=run, say=said.append)
    return options.fingerprint(), options.data_dir, said


@pytest.mark.parametrize(
    ("given", "variable"),
    [
        ({"option": MINE}, "empty"),
        ({}, "mine"),
        ({"option": MINE, "run": "digits"}, ""),  # the plan refuses to resume this run
        ({"start": "mnist", "run": "digits"}, "mine"),
    ],
)
def test_the_option_counts_before_the_variable(given, variable, monkeypatch):
    monkeypatch.setenv("MNIST_DATA_DIR", variable)
    assert choose(**given) == ("mnist", MINE, [])


def test_without_a_name_it_is_data(here):
    (found, folder, (said,)) = choose()
    assert (found, folder) == ("digits", None)
    assert said.startswith("MNIST is not in data/MNIST/raw and cannot be downloaded (")
    (here / "data").symlink_to(MINE)
    assert choose() == ("mnist", None, [])
    for name in ("mnist", "digits"):
        assert choose(dataset=name) == choose(start=name) == choose(run=name) == (name, None, [])


@pytest.mark.parametrize(
    ("given", "variable", "told"),
    [
        ({"option": EMPTY}, "mine", "empty/MNIST/raw lacks "),
        ({"option": EMPTY, "run": "digits"}, "", "empty/MNIST/raw lacks "),
        ({}, "empty", "empty/MNIST/raw lacks "),
        ({"start": "mnist"}, "", "data/MNIST/raw lacks "),
        ({"run": "mnist"}, "", "data/MNIST/raw lacks "),
        ({"start": "mnist", "dataset": "digits"}, "", "--dataset digits: the start checkpoint "),
    ],
)
def test_what_requires_mnist(given, variable, told, monkeypatch):
    """Otherwise the command would train on digits, and end with status 0."""
    monkeypatch.setenv("MNIST_DATA_DIR", variable)
    assert problem(choose, **given).startswith(told)


def test_the_folder_is_no_part_of_the_identity():
    """A run goes on with moved data, and only if the command names the new place."""
    make_run(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=MINE), (100,), dataset="mnist")
    moved = MINE.rename("moved")
    assert prepare_run(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=moved)).is_done
    for stage, options in (
        (PRETRAIN, PretrainOptions(accelerator="cpu")),
        (FINETUNE, FinetuneOptions(accelerator="cpu")),
    ):
        assert "data/MNIST/raw lacks " in problem(prepare_run, stage, options)


def test_a_start_from_digits_says_that_a_named_folder_is_not_read():
    said = ["mine is not read: the start checkpoint was trained on digits."]
    assert choose(MINE, start="digits") == ("digits", None, said)


@pytest.mark.long
def test_the_next_command_names_the_folder(mnist_dir, here):
    """As it stands on the console, it finds the images."""
    folder = here / "a folder"
    folder.symlink_to(mnist_dir)
    common = ("--accelerator", "cpu", "--max-steps", 1, "--output-dir", "runs 2")
    first = run_script("model_pretrain.py", "--data-dir", folder, *common, cwd=here)
    (command,) = re.findall(r"^  next +\./run finetune (.*)$", first.err, re.MULTILINE)
    second = run_script("model_finetune.py", *shlex.split(command), *common[:4], cwd=here)
    assert second.output().startswith(f"{here}/runs 2/finetune/")
    assert " mnist on " in second.err
