"""Run directories: what identifies a run, where it goes on, who may use it."""

import os
from dataclasses import replace

import pytest

from megakit.checkpoints.manifest import checkpoint_name, read_manifest, verify, write_manifest
from megakit.job.runs import RUN_FILE, RunDirectory, check_writable, find_resumption
from tests.fabricate import make_checkpoint
from tests.hostile import problem as problem_of
from tests.megakit.job.stages import spoil


class TestRunDirectory:
    @pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe{}"])
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

    def test_it_goes_on_from_the_newest_that_is_whole_and_its_own(self, tmp_path, lines):
        """Not the best; what a kill left goes, and what is damaged or another's steps aside."""
        directory, run = RunDirectory(tmp_path), {"seed": 1}
        steps = {10: 0.1, 20: 0.2, 30: 0.3, 40: 0.4}
        made = {
            step: make_checkpoint(directory.checkpoints, step, val_loss=loss, run=run)
            for step, loss in steps.items()
        }
        spoil(made[30])
        write_manifest(made[40], replace(read_manifest(made[40]), stage="finetune"))
        (directory.checkpoints / ".step=000050" / "weights").mkdir(parents=True)
        found = find_resumption(directory, "pretrain", run, lines.append)
        assert found == (made[20], verify(made[20]))
        assert sorted(path.name for path in directory.checkpoints.iterdir()) == [
            *("damaged-step=000030", "foreign-step=000040", "step=000010", "step=000020")
        ]
        for line, name in zip(lines, ("damaged-step=000030", "foreign-step=000040"), strict=True):
            assert line.endswith(f"{name}.")


class TestWritable:
    def test_a_file_in_its_place(self, tmp_path):
        (tmp_path / "file").write_text("")
        (problem,) = check_writable(tmp_path / "file" / "runs")
        for part in ("--output-dir", str(tmp_path / "file" / "runs"), "is a file"):
            assert part in problem

    def test_a_folder_without_permission(self, tmp_path, monkeypatch):
        """Root may write everywhere, so the answer is that for another user."""
        folder = tmp_path / "folder"
        folder.mkdir(0o500)
        monkeypatch.setattr(os, "access", lambda path, asked: 5 & asked == asked)
        for place in (folder, folder / "deeper") if os.geteuid() == 0 else (folder,):
            (problem,) = check_writable(place)
            assert "cannot be written" in problem
