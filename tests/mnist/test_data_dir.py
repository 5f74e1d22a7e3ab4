"""Which folder MNIST is read from, and that no stage changes the dataset silently."""

from pathlib import Path
from typing import Any

import pytest

from megakit.job.runs import RunDirectory, Stage
from mnist.data_dir import choose_data_dir
from model_finetune import FINETUNE, FinetuneOptions
from model_predict import PREDICT, PredictOptions
from model_pretrain import PRETRAIN, PretrainOptions
from tests.fabricate import make_run, prepare_run
from tests.mnist.made_up import link_files
from tests.refusals import problem
from tests.scripts import read_json


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
    """A finished run, whose checkpoints say that it was trained on MNIST."""
    return make_run(stage, options, (100,), dataset="mnist")


def remove_files(root: Path) -> None:
    for path in (root / "MNIST" / "raw").iterdir():
        path.unlink()


class TestChoice:
    def choose(self, lines: list[str], *used: tuple[str, Path], named: Path | None = None) -> Path:
        folders = {Path(run): str(folder) for run, folder in used}
        return choose_data_dir(named, folders, lines.append)

    def test_the_option_before_the_variable_before_the_run(self, mine, lines, monkeypatch):
        monkeypatch.setenv("MNIST_DATA_DIR", "/of/the/variable")
        used = ("runs/pretrain", mine)
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
        assert self.choose(lines, ("runs/finetune", lost), ("runs/pretrain", mine)) == mine
        assert lines[0] == f"{lost}, which runs/finetune used, does not contain MNIST any more."
        assert len(lines) == 2


class TestRuns:
    """What prepared runs remember, without any training."""

    @pytest.fixture(autouse=True)
    def pretrained(self, mine):
        return finished(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=mine))

    def test_a_run_and_the_stages_after_it_read_the_same_folder(self, mine):
        finished(FINETUNE, FinetuneOptions(accelerator="cpu"))
        for stage, options in (
            (PRETRAIN, PretrainOptions(accelerator="cpu")),
            (FINETUNE, FinetuneOptions(accelerator="cpu")),
            (PREDICT, PredictOptions(accelerator="cpu")),
            (PRETRAIN, PretrainOptions(accelerator="cpu", fresh=True)),
        ):
            plan = prepare_run(stage, options)
            assert (plan.dataset, plan.chosen["data_dir"]) == ("mnist", mine)
            assert options.data_dir == mine

    def test_the_folder_is_no_part_of_the_identity(self, mine, made_up_mnist, tmp_path, pretrained):
        """Moved data goes on with the run, and the run then remembers the new place."""
        moved = link_files(made_up_mnist, tmp_path / "moved" / "MNIST" / "raw")
        remove_files(mine)
        plan = prepare_run(PRETRAIN, PretrainOptions(accelerator="cpu", data_dir=moved))
        assert plan.is_done
        assert pretrained.identity() == plan.identity
        assert read_json(pretrained.path / "run.json")["places"] == {"data_dir": str(moved)}

    def test_the_files_are_gone(self, mine):
        remove_files(mine)
        told = problem(prepare_run, FINETUNE, FinetuneOptions(accelerator="cpu"))
        assert told.startswith(
            "--dataset auto (mnist, as in the earlier run): data/MNIST/raw lacks"
        )
        assert "Copy the files there, or choose another --data-dir." in told

    def test_the_option_names_another_dataset(self, mine):
        """Which only a start from fresh weights may do."""
        options = {"accelerator": "cpu", "dataset": "digits", "data_dir": mine}
        told = problem(prepare_run, FINETUNE, FinetuneOptions(**options))
        assert told == (
            "--dataset digits: the start checkpoint, of runs/pretrain, was trained on mnist. "
            "Leave --dataset out, or start from a checkpoint that was trained on digits."
        )
        assert not Path("runs/finetune").exists()
        fresh = FinetuneOptions(checkpoint="none", **options)
        assert prepare_run(FINETUNE, fresh).dataset == "digits"
