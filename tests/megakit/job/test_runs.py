"""Run directories: what identifies a run, where it goes on, who may use it."""

import os
from dataclasses import replace
from typing import ClassVar

import pytest

from megakit.checkpoints.folders import checkpoint_name
from megakit.checkpoints.manifest import read_manifest, verify, write_manifest
from megakit.job.runs import RUN_FILE, RunDirectory, check_writable, find_resumption
from tests.disk import Disk
from tests.fabricate import make_checkpoint
from tests.hostile import problem as problem_of
from tests.megakit.job.stages import spoil


class TestRunDirectory:
    def test_nothing_there(self, tmp_path):
        directory = RunDirectory(tmp_path / "first")
        assert directory.identity() is None
        assert directory.newest_step is None
        assert directory.best_checkpoint() is None
        assert not directory.path.exists()

    def test_identity_comes_back(self, tmp_path):
        directory = RunDirectory(tmp_path / "runs" / "first")
        identity = {"seed": 1, "lr": 1e-3, "num_labels": None, "dataset": "plums"}
        directory.write_identity(identity)
        assert directory.identity() == identity
        assert [path.name for path in directory.path.iterdir()] == [RUN_FILE]

    def test_a_new_identity_replaces_the_old_one_in_one_step(self, tmp_path, monkeypatch):
        directory = RunDirectory(tmp_path)
        directory.write_identity({"seed": 1})
        disk = Disk(monkeypatch)
        directory.write_identity({"seed": 1})  # nothing to write
        assert disk.events == []
        directory.write_identity({"seed": 2})
        assert disk.events[-1] == f"rename .{RUN_FILE}.partial to {RUN_FILE}"
        assert directory.identity() == {"seed": 2}

    @pytest.mark.parametrize("in_file", ["{", '{"seed": 3}', None], ids=str)
    def test_the_checkpoints_say_more_than_the_file(self, tmp_path, in_file):
        directory = RunDirectory(tmp_path)
        make_checkpoint(directory.checkpoints, 10, run={"seed": 1})
        make_checkpoint(directory.checkpoints, 20, run={"seed": 2})
        if in_file is not None:
            (tmp_path / RUN_FILE).write_text(in_file)
        assert directory.identity() == {"seed": 2}
        directory.write_identity({"seed": 1})
        assert directory.identity() == {"seed": 1}

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b"null", b"\0\1", b'"text"', b"\xff\xfe{}"]
    )
    def test_damaged_identity(self, tmp_path, content):
        directory = RunDirectory(tmp_path)
        (tmp_path / RUN_FILE).write_bytes(content)
        problem = problem_of(directory.identity)
        assert str(tmp_path / RUN_FILE) in problem
        assert "--fresh" in problem

    def test_the_best_checkpoint_is_chosen_as_the_run_says(self, tmp_path):
        for by, step in (("val_loss", 10), ("last", 20), (None, 10)):
            directory, run = RunDirectory(tmp_path / str(by)), {"best_by": by} if by else {}
            make_checkpoint(directory.checkpoints, 10, val_loss=0.1, run=run)
            make_checkpoint(directory.checkpoints, 20, val_loss=0.2, run=run)
            assert directory.best_checkpoint() == directory.checkpoints / checkpoint_name(step)

    def test_no_best_checkpoint_among_those_of_two_runs(self, tmp_path):
        directory = RunDirectory(tmp_path)
        for step, seed in ((10, 1), (20, 2)):
            make_checkpoint(directory.checkpoints, step, val_loss=0.1, run={"seed": seed})
        problem = problem_of(directory.best_checkpoint)
        for part in (str(directory.checkpoints / "step=000010"), "another run", "--checkpoint"):
            assert part in problem

    def test_each_renamed_run_gets_a_name_of_its_own(self, tmp_path):
        directory = RunDirectory(tmp_path / "first")
        for number in (1, 2, 3):
            directory.write_identity({"seed": number})
            aside = tmp_path / f"first.{number}"
            assert directory.rename() == aside
            assert RunDirectory(aside).identity() == {"seed": number}
            assert not directory.path.exists()

    def test_a_run_that_is_withdrawn_gives_its_place_back(self, tmp_path):
        directory = RunDirectory(tmp_path / "first")
        directory.write_identity({"seed": 1})
        old = directory.rename()
        directory.write_identity({"seed": 2})
        assert directory.withdraw(str(old))
        assert directory.identity() == {"seed": 1}
        assert [path.name for path in tmp_path.iterdir()] == ["first"]
        assert not directory.withdraw()  # there is no other run
        assert directory.identity() is None


class TestResumption:
    RUN: ClassVar = {"seed": 1}

    def find(self, directory, lines):
        return find_resumption(directory, "pretrain", self.RUN, lines.append)

    def test_nothing_to_go_on_from(self, tmp_path, lines):
        assert self.find(RunDirectory(tmp_path), lines) is None

    def test_the_newest_that_is_whole_and_its_own(self, tmp_path, lines):
        """Not the best; what a kill left goes, and what is damaged or another's steps aside."""
        directory = RunDirectory(tmp_path)
        steps = {10: 0.1, 20: 0.2, 30: 0.3, 40: 0.4}
        made = {
            step: make_checkpoint(directory.checkpoints, step, val_loss=loss, run=self.RUN)
            for step, loss in steps.items()
        }
        spoil(made[30])
        write_manifest(made[40], replace(read_manifest(made[40]), stage="finetune"))
        (directory.checkpoints / ".step=000050" / "weights").mkdir(parents=True)
        assert self.find(directory, lines) == (made[20], verify(made[20]))
        assert sorted(path.name for path in directory.checkpoints.iterdir()) == [
            *("damaged-step=000030", "foreign-step=000040", "step=000010", "step=000020")
        ]
        for line, name in zip(lines, ("damaged-step=000030", "foreign-step=000040"), strict=True):
            assert line.endswith(f"{name}.")


class TestWritable:
    def test_a_folder_that_is_not_there_yet(self, tmp_path):
        assert check_writable(tmp_path / "a" / "b") == []
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("below", ["", "runs", "runs/deeper"])
    def test_a_file_in_its_place(self, tmp_path, below):
        (tmp_path / "file").write_text("")
        (problem,) = check_writable(tmp_path / "file" / below)
        for part in ("--output-dir", str(tmp_path / "file" / below), "is a file"):
            assert part in problem

    @pytest.mark.parametrize("mode", [0o500, 0o600])
    def test_a_folder_without_permission(self, tmp_path, monkeypatch, mode):
        """Root may write everywhere, so the answer is that for another user."""
        folder = tmp_path / "folder"
        folder.mkdir(mode)
        monkeypatch.setattr(os, "access", lambda path, asked: mode >> 6 & asked == asked)
        for place in (folder, folder / "deeper") if os.geteuid() == 0 else (folder,):
            (problem,) = check_writable(place)
            assert "cannot be written" in problem
