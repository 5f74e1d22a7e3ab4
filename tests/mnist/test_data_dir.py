"""Which folder MNIST is read from, and that no command changes the dataset silently."""

from pathlib import Path

import pytest

from megakit.job.options import EarlierRun
from mnist.data_dir import choose_data_dir
from mnist.files import find_data
from model_finetune import FINETUNE, FinetuneOptions
from model_predict import PREDICT, PredictOptions
from model_pretrain import PRETRAIN, PretrainOptions
from tests.fabricate import make_run, prepare_run
from tests.mnist.made_up import link_files
from tests.refusals import CLOSED_PROXY, problem
from tests.scripts import read_json, run_script


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None) -> Path:
    """The current folder, without any data; no mirror answers."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def mine(made_up_mnist: Path, tmp_path: Path) -> Path:
    """A folder of the user's with the files, for a test to remove."""
    return link_files(made_up_mnist, tmp_path / "mine" / "MNIST" / "raw")


def test_the_option_before_the_variable_before_the_run(mine, tmp_path, lines, monkeypatch):
    used = {Path("runs/finetune"): str(tmp_path / "lost"), Path("runs/pretrain"): str(mine)}
    monkeypatch.setenv("MNIST_DATA_DIR", "/of/the/variable")
    assert choose_data_dir(Path("x"), used, lines.append) == Path("x")
    assert choose_data_dir(None, used, lines.append) == Path("/of/the/variable")
    monkeypatch.setenv("MNIST_DATA_DIR", "")
    assert lines == []
    assert choose_data_dir(None, used, lines.append) == mine
    assert lines == [
        f"{tmp_path / 'lost'}, which runs/finetune used, does not contain MNIST any more."
    ]


def test_a_run_and_the_stages_after_it_read_the_same_folder(mine):
    make_run(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine), (100,), dataset="mnist")
    make_run(FINETUNE, FinetuneOptions(accelerator="cpu"), (100,), dataset="mnist")
    for stage, options in (
        (PRETRAIN, PretrainOptions(accelerator="cpu")),
        (FINETUNE, FinetuneOptions(accelerator="cpu")),
        (PREDICT, PredictOptions(accelerator="cpu")),
        (PRETRAIN, PretrainOptions(accelerator="cpu", fresh=True)),
    ):
        plan = prepare_run(stage, options)
        assert (plan.dataset, plan.chosen["data_dir"]) == ("mnist", mine)
        assert options.data_dir == mine


def test_the_folder_is_no_part_of_the_identity(mine, made_up_mnist, tmp_path):
    """Moved data goes on with the run, and the run then remembers the new place."""
    options = PretrainOptions(accelerator="cpu", data_dir=mine)
    pretrained = make_run(PRETRAIN, options, (100,), dataset="mnist")
    moved = link_files(made_up_mnist, tmp_path / "moved" / "MNIST" / "raw")
    for path in (mine / "MNIST" / "raw").iterdir():
        path.unlink()
    plan = prepare_run(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=moved))
    assert plan.is_done
    assert pretrained.identity() == plan.identity
    assert read_json(pretrained.path / "run.json")["places"] == {"data_dir": str(moved)}


def test_a_start_that_was_trained_on_another_dataset_is_refused(mine):
    make_run(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine), (100,), dataset="mnist")
    told = problem(prepare_run, FINETUNE, FinetuneOptions(accelerator="cpu", dataset="digits"))
    assert told.startswith(
        "--dataset digits: the start checkpoint, of runs/pretrain, was trained on mnist."
    )


def test_a_named_folder_without_mnist(tmp_path):
    """The command itself, which would otherwise train on digits, and end with status 0."""
    done = run_script(
        *("model_pretrain.py", "--max-steps", 1, "--data-dir", tmp_path, "--accelerator", "cpu"),
        cwd=tmp_path,
        **dict.fromkeys(("https_proxy", "HTTPS_PROXY"), CLOSED_PROXY),
    )
    assert (done.status, done.out) == (2, "")
    assert (
        f": --data-dir {tmp_path}: {tmp_path}/MNIST/raw lacks train-images-idx3-ubyte," in done.err
    )
    assert done.err.endswith("Copy the files there, or choose another --data-dir.\n")


def test_a_folder_is_not_named_for_a_run_of_digits(mine, monkeypatch):
    options = PretrainOptions(accelerator="cpu", data_dir=mine, dataset="digits")
    run = make_run(PRETRAIN, options, (100,))
    assert run.places() == {}
    assert prepare_run(FINETUNE, FinetuneOptions(accelerator="cpu")).dataset == "digits"
    monkeypatch.setenv("MNIST_DATA_DIR", str(mine))
    assert prepare_run(FINETUNE, FinetuneOptions(accelerator="cpu")).dataset == "digits"
    told = problem(prepare_run, PRETRAIN, PretrainOptions(accelerator="cpu"))
    assert "--dataset was digits, now mnist" in told


@pytest.mark.parametrize("name", ["--data-dir ", "MNIST_DATA_DIR="])
def test_a_start_from_digits_says_that_a_named_folder_is_not_read(name, mine, monkeypatch):
    said: list[str] = []
    options = FinetuneOptions()
    start = EarlierRun(Path("runs/pretrain"), True, "digits", {})
    vars(options).update(earlier=[start], say=said.append)
    if name == "--data-dir ":
        options.data_dir = mine
    else:
        monkeypatch.setenv("MNIST_DATA_DIR", str(mine))
    assert options.fingerprint() == "digits"
    assert said == [f"{name}{mine} is not read: the start checkpoint was trained on digits."]


def test_a_run_whose_folder_is_lost_does_not_start_over_on_digits(mine, elsewhere):
    make_run(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine), (100,), dataset="mnist")
    assert find_data(Path("runs")) == (mine, "mnist")
    mine.rename(mine.with_name("moved"))
    told = problem(prepare_run, PRETRAIN, PretrainOptions(accelerator="cpu", fresh=True))
    assert told.startswith("--dataset auto (mnist, as in the earlier run): data/MNIST/raw lacks")
    assert problem(find_data, Path("runs")) == told
    assert find_data(Path("others")) == (Path("data"), "digits")
