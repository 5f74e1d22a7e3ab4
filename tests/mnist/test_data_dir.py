"""Which folder MNIST is read from, and that no stage changes the dataset silently."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from megakit.checkpoints.folders import checkpoint_name
from megakit.errors import UserError
from megakit.job.remembered import EarlierRun, earlier_runs
from megakit.job.runs import RunDirectory
from megakit.job.stage import Stage
from mnist.data_dir import DEFAULT, UsedFolder, choose_data_dir, find_data_dir, holds_mnist
from mnist.files import MNIST_SHA256
from model_finetune import FINETUNE, FinetuneOptions
from model_predict import PREDICT, PredictOptions
from model_pretrain import PRETRAIN, PretrainOptions
from tests.fabricate import make_run, prepare_run
from tests.hostile import problem
from tests.mnist.made_up import TEST_LABELS, link_files
from tests.scripts import read_csv, read_json, run_script


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None) -> Path:
    """The current folder, without any data; no mirror answers, and no variable is set."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MNIST_DATA_DIR", raising=False)
    return folder


@pytest.fixture
def mine(made_up_mnist: Path, tmp_path: Path) -> Path:
    """A folder of the user's with the files, for a test to remove."""
    return link_files(made_up_mnist, tmp_path / "mine" / "MNIST" / "raw")


def finished(stage: Stage, options: Any) -> RunDirectory:
    """A finished run, whose checkpoints say which dataset it was trained on."""
    dataset = "digits" if options.dataset == "digits" else "mnist"
    return make_run(stage, options, (100,), dataset=dataset)


def remove_files(root: Path) -> None:
    for path in (root / "MNIST" / "raw").iterdir():
        path.unlink()


class TestChoice:
    def choose(
        self, lines: list[str], *used: tuple[str, Path, bool], named: Path | None = None
    ) -> Path:
        folders = [UsedFolder(Path(run), folder, nearby) for run, folder, nearby in used]
        return choose_data_dir(named, folders, lines.append)

    def test_the_option_before_the_variable_before_the_run(self, mine, lines, monkeypatch):
        monkeypatch.setenv("MNIST_DATA_DIR", "/of/the/variable")
        used = ("runs/pretrain", mine, False)
        assert self.choose(lines, used, named=Path("x")) == Path("x")
        assert self.choose(lines, used) == Path("/of/the/variable")
        monkeypatch.setenv("MNIST_DATA_DIR", "")
        assert lines == []
        assert self.choose(lines, used) == mine
        assert lines == [
            f"MNIST is read from {mine}, as for runs/pretrain. --data-dir or MNIST_DATA_DIR names "
            "another folder."
        ]

    def test_the_first_run_that_still_has_its_files(self, mine, tmp_path, lines):
        lost = tmp_path / "lost"
        used = ("runs/finetune", lost, False), ("runs/finetune", lost, False)
        assert self.choose(lines, *used, ("runs/pretrain", mine, False)) == mine
        assert lines[0] == f"{lost}, which runs/finetune used, does not contain MNIST any more."
        assert len(lines) == 2

    def test_a_file_less_is_a_lost_folder(self, mine, lines):
        (mine / "MNIST" / "raw" / TEST_LABELS).unlink()
        assert self.choose(lines, ("runs/pretrain", mine, False)) == DEFAULT
        assert "does not contain MNIST any more" in lines[0]

    def test_a_folder_that_cannot_be_read_is_a_lost_folder(self, mine, lines):
        remove_files(mine)
        (mine / "MNIST" / "raw").rmdir()
        (mine / "MNIST" / "raw").symlink_to("raw")  # not even root can follow it
        assert not holds_mnist(mine)
        assert self.choose(lines, ("runs/pretrain", mine, False)) == DEFAULT

    def test_nearby_runs_only_prevent_a_download(self, mine, made_up_mnist, elsewhere, lines):
        nearby = ("runs/pretrain", mine, True)
        assert self.choose(lines, nearby) == mine
        assert len(lines) == 1
        link_files(made_up_mnist, elsewhere / "data" / "MNIST" / "raw")
        assert self.choose(lines, nearby) == DEFAULT
        remove_files(mine)
        remove_files(elsewhere / "data")
        assert self.choose(lines, nearby) == DEFAULT
        assert len(lines) == 1, "nobody expects a run of another name to have data"

    def test_the_usual_folder_needs_no_line(self, made_up_mnist, elsewhere, lines):
        link_files(made_up_mnist, elsewhere / "data" / "MNIST" / "raw")
        assert self.choose(lines, ("runs/pretrain", elsewhere / "data", False)) == DEFAULT
        remove_files(elsewhere / "data")
        assert self.choose(lines, ("runs/pretrain", elsewhere / "data", False)) == DEFAULT
        assert lines == []


class TestMemory:
    """What prepared runs remember, without any training."""

    def test_a_run_and_the_stage_after_it(self, mine):
        finished(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine))
        content = read_json(Path("runs/pretrain/run.json"))
        assert content["places"] == {"data_dir": str(mine)}
        assert "data_dir" not in content
        for options in (PretrainOptions(accelerator="cpu"), FinetuneOptions(accelerator="cpu")):
            stage = PRETRAIN if isinstance(options, PretrainOptions) else FINETUNE
            plan = prepare_run(stage, options)
            assert (plan.dataset, plan.places) == ("mnist", {"data_dir": str(mine)})
            assert options.data_dir == mine

    def test_the_folder_is_no_part_of_the_identity(self, mine, made_up_mnist, tmp_path):
        """Moved data goes on with the run, and the run then remembers the new place."""
        directory = finished(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine))
        moved = link_files(made_up_mnist, tmp_path / "moved" / "MNIST" / "raw")
        remove_files(mine)
        plan = prepare_run(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=moved))
        assert plan.is_done
        assert "places" not in plan.identity
        assert directory.identity() == plan.identity
        assert read_json(directory.path / "run.json")["places"] == {"data_dir": str(moved)}

    def test_a_relative_folder_is_remembered_as_an_absolute_one(self, mine, monkeypatch):
        monkeypatch.chdir(mine.parent)
        plan = prepare_run(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=Path("mine")))
        assert plan.places == {"data_dir": str(mine)}

    def test_digits_are_read_from_no_folder(self):
        options = PretrainOptions(accelerator="cpu", dataset="digits", data_dir=Path("nowhere"))
        assert prepare_run(PRETRAIN, options).places == {}
        assert "places" not in read_json(Path("runs/pretrain/run.json"))

    def test_ranks_get_the_folder_of_the_plan(self, mine):
        options = PretrainOptions()
        options.adopt({"data_dir": str(mine)})
        assert options.data_dir == mine
        options = PretrainOptions(data_dir=Path("mine"))
        options.adopt({"data_dir": str(mine)})
        assert options.data_dir == Path("mine")

    def test_a_fresh_start_remembers_too(self, mine):
        finished(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine))
        options = PretrainOptions(accelerator="cpu", fresh=True)
        assert prepare_run(PRETRAIN, options).places == {"data_dir": str(mine)}

    @pytest.mark.parametrize("output_dir", ["runs/two", "runs/two/deep", "other"])
    def test_a_new_output_folder_does_not_change_the_dataset(self, mine, output_dir):
        """README's next commands have other output folders than `./run tutorial --data-dir X`."""
        finished(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine))
        options = PretrainOptions(accelerator="cpu", output_dir=Path(output_dir))
        assert prepare_run(PRETRAIN, options).dataset == "mnist"
        assert options.data_dir == mine

    def test_a_named_checkpoint_of_another_folder(self, mine, tmp_path):
        runs = tmp_path / "far" / "runs"
        finished(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine, output_dir=runs))
        best = runs / "pretrain" / "checkpoints" / checkpoint_name(PretrainOptions.max_steps)
        options = FinetuneOptions(accelerator="cpu", checkpoint=str(best))
        assert prepare_run(FINETUNE, options).places == {"data_dir": str(mine)}
        assert earlier_runs(FINETUNE, Path("x"))[0].path == Path("x/finetune")

    @pytest.mark.parametrize(
        "places",
        [
            *({"data_dir": 3}, {"data_dir": "relative"}, {"data_dir": "/a\nb"}, {"data_dir": None}),
            *({"data_dir": "/nul\0"}, ["data_dir"], "data_dir", 7, None),
        ],
    )
    def test_what_a_damaged_run_json_says_counts_for_nothing(self, mine, places, lines):
        directory = finished(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine))
        path = directory.path / "run.json"
        path.write_text(json.dumps(read_json(path) | {"places": places}))
        assert {} in [run.places for run in earlier_runs(PRETRAIN, Path("runs"))]
        with pytest.raises(UserError, match="cannot be downloaded"):  # mnist, as before
            prepare_run(PRETRAIN, PretrainOptions(accelerator="cpu"))

    def test_run_json_may_be_no_file(self, tmp_path):
        (tmp_path / "pretrain").mkdir()
        os.mkfifo(tmp_path / "pretrain" / "run.json")
        assert not any(run.places for run in earlier_runs(PRETRAIN, tmp_path))

    def test_the_notebook_makes_the_same_choice(self, mine, lines, tmp_path, monkeypatch):
        default = tmp_path / "project" / "data"
        assert find_data_dir(Path("runs"), default, lines.append) == default
        finished(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine))
        assert lines == []
        assert find_data_dir(Path("runs"), default, lines.append) == mine
        assert len(lines) == 1
        monkeypatch.setenv("MNIST_DATA_DIR", "/of/the/variable")
        assert find_data_dir(Path("runs"), default, lines.append) == Path("/of/the/variable")


class TestDataset:
    """A stage never goes on with another dataset than that of its start checkpoint."""

    def test_the_files_are_gone(self, mine):
        finished(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine))
        remove_files(mine)
        told = problem(prepare_run, FINETUNE, FinetuneOptions(accelerator="cpu"))
        assert told.startswith(
            "--dataset auto (mnist, as in the earlier run): data/MNIST/raw lacks"
        )
        assert "Copy the files there, or choose another --data-dir." in told

    @pytest.mark.parametrize(("before", "now"), [("mnist", "digits"), ("digits", "mnist")])
    def test_the_option_names_another_dataset(self, mine, before, now):
        finished(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine, dataset=before))
        options = FinetuneOptions(accelerator="cpu", dataset=now, data_dir=mine)
        told = problem(prepare_run, FINETUNE, options)
        assert told == (
            f"--dataset {now}: the start checkpoint, of runs/pretrain, was trained on {before}. "
            f"Leave --dataset out, or start from a checkpoint that was trained on {now}."
        )
        assert not Path("runs/finetune").exists()

    def test_fresh_weights_have_no_dataset(self, mine):
        finished(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine))
        options = FinetuneOptions(accelerator="cpu", dataset="digits", checkpoint="none")
        assert prepare_run(FINETUNE, options).dataset == "digits"

    def test_imported_weights_have_no_dataset(self):
        options = FinetuneOptions(accelerator="cpu", dataset="digits")
        options.recall([EarlierRun(Path("/imported"), "start", {}, "")])
        assert options.resolve_dataset(None, print) == "digits"

    def test_predictions_too(self, mine):
        finished(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine))
        finished(FINETUNE, FinetuneOptions(accelerator="cpu"))
        told = problem(prepare_run, PREDICT, PredictOptions(accelerator="cpu", dataset="digits"))
        assert "the start checkpoint, of runs/finetune, was trained on mnist" in told
        plan = prepare_run(PREDICT, PredictOptions(accelerator="cpu"))
        assert (plan.dataset, plan.places) == ("mnist", {"data_dir": str(mine)})

    def test_an_empty_checkpoint_of_a_command_that_failed(self, refused):
        told = refused.problem("model_finetune.py", "--checkpoint", "")
        assert told.startswith("--checkpoint '': the value is empty.")
        assert "a command in $(...) failed; its own message says why" in told


@pytest.mark.long
def test_the_commands_after_a_tutorial_with_a_folder_of_its_own(mnist_dir, elsewhere):
    """Without a network, all of them find MNIST, on one process and on two."""
    offline = {"https_proxy": "http://127.0.0.1:9", "MNIST_DATA_DIR": None}
    short = ("--accelerator", "cpu", "--max-steps", 4, "--global-batch-size", 32)

    def start(script, *options):
        done = run_script(script, *options, cwd=elsewhere, **offline)
        assert "digits" not in done.err
        return done

    start("model_pretrain.py", "--data-dir", mnist_dir, *short).output()
    for folder, devices in (("runs", 1), ("runs/two", 2)):
        common = ("--output-dir", folder, "--devices", devices)
        first = start("model_pretrain.py", *short, *common)
        checkpoint = first.output().strip()
        assert f"MNIST is read from {mnist_dir}" in first.err
        start("model_finetune.py", *short, *common, "--checkpoint", checkpoint).output()
        written = start("model_predict.py", "--accelerator", "cpu", *common).output().strip()
        assert len(read_csv(elsewhere / written)) == 10_000
    again = start("model_pretrain.py", *short, "--fresh", "--precision", 32)
    next_line = re.search(r"^  next +(.*)$", again.err, re.M)
    assert next_line is not None
    expected = "./run finetune --precision 32"
    assert next_line[1] == expected, "the next stage finds the folder itself"
    assert RunDirectory(elsewhere / "runs" / "pretrain").newest_step == 4
    assert len(MNIST_SHA256) == 4
