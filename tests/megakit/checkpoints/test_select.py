"""Choosing a checkpoint: the best, the newest that is whole, and what is swept away."""

import errno
import math
import os
from dataclasses import replace
from typing import ClassVar

import pytest

from megakit.checkpoints.folders import MANIFEST
from megakit.checkpoints.manifest import read_manifest, verify, write_manifest
from megakit.checkpoints.select import (
    best_checkpoint,
    keep_own_checkpoints,
    lock_checkpoint,
    remove,
    remove_leftovers,
)
from megakit.errors import UserError
from tests.fabricate import make_checkpoint


def make(folder, losses):
    return {step: make_checkpoint(folder, step, val_loss=loss) for step, loss in losses.items()}


def cut(checkpoint):
    (checkpoint / "weights" / "__0_0.distcp").write_bytes(b"")


class TestBest:
    @pytest.mark.parametrize(
        ("losses", "best"),
        [
            ({10: 0.3, 20: 0.1, 30: 0.2}, 20),
            ({10: 0.2, 20: 0.1, 30: 0.1}, 20),  # of two equal ones the older
            ({10: None, 20: 0.2, 30: None}, 20),
            ({10: None, 20: None}, 20),
            ({10: math.nan, 20: 0.5}, 20),
            ({10: 0.5, 20: math.nan}, 10),
            ({10: math.inf, 20: 0.5}, 20),
        ],
    )
    def test_lowest_validation_loss(self, tmp_path, losses, best):
        made = make(tmp_path, losses)
        assert best_checkpoint(tmp_path) == made[best]

    def test_the_last_where_that_counts(self, tmp_path):
        made = make(tmp_path, {10: 0.1, 20: 0.2})
        assert best_checkpoint(tmp_path, by="last") == made[20]

    @pytest.mark.parametrize(
        ("is_highest", "values", "best"),
        [
            (True, {10: 0.3, 20: 0.9, 30: 0.9}, 20),  # of two equal ones the older
            (False, {10: 0.3, 20: 0.9, 30: 0.9}, 10),
            (True, {10: math.nan, 20: 0.1, 30: None}, 20),
            (True, {10: math.nan, 20: math.nan}, 10),
        ],
    )
    def test_any_validated_value(self, tmp_path, is_highest, values, best):
        made = make(tmp_path, dict.fromkeys(values, 0.5))
        for step, value in values.items():
            named = {} if value is None else {"val_top": value}
            manifest = read_manifest(made[step])
            changed = replace(manifest, values=named, higher_is_better=is_highest)
            write_manifest(made[step], changed)
        assert best_checkpoint(tmp_path, by="val_top") == made[best]
        assert best_checkpoint(tmp_path) == made[10]  # the losses are equal

    def test_none(self, tmp_path):
        assert best_checkpoint(tmp_path) is None
        assert best_checkpoint(tmp_path / "nothing", by="last") is None

    def test_damaged_manifests_are_not_passed_over(self, tmp_path):
        made = make(tmp_path, {10: 0.1, 20: 0.2})
        (made[20] / MANIFEST).write_text("{")
        with pytest.raises(UserError, match=r"step=000020.*cannot be read"):
            best_checkpoint(tmp_path)

    def test_what_is_not_complete_is_no_candidate(self, tmp_path):
        made = make(tmp_path, {10: 0.2})
        for name in (".step=000020", "damaged-step=000030", ".removing-step=000005"):
            (tmp_path / name).mkdir()
        assert best_checkpoint(tmp_path) == made[10]


class TestOwn:
    RUN: ClassVar = {"seed": 1}

    @pytest.fixture
    def made(self, tmp_path):
        """Of steps 10 to 50; the run's own are those of 10 and 20."""
        made = {s: make_checkpoint(tmp_path, s, run=self.RUN) for s in (10, 20, 30, 40, 50)}
        (made[30] / MANIFEST).write_text("{")
        write_manifest(made[40], replace(read_manifest(made[40]), run={"seed": 2}))
        write_manifest(made[50], replace(read_manifest(made[50]), stage="finetune"))
        return made

    def test_others_are_set_aside(self, tmp_path, made):
        cut(made[10])
        lines: list[str] = []
        kept = keep_own_checkpoints(tmp_path, "pretrain", self.RUN, lines.append)
        assert list(kept) == [made[20]]
        names = ["damaged-step=000010", "damaged-step=000030"]
        names += ["foreign-step=000040", "foreign-step=000050"]
        assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "step=000020"]
        for line, step in zip(lines, (10, 30, 40, 50), strict=True):
            assert str(made[step]) in line
            assert "Use another checkpoint" not in line, "the run does it itself"
        assert (tmp_path / "damaged-step=000010" / "weights").is_dir()

    def test_one_of_another_version_is_refused_and_stays(self, tmp_path):
        checkpoint = make_checkpoint(tmp_path, 10)
        path = checkpoint / MANIFEST
        path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 1'))
        with pytest.raises(UserError, match=r"format version 1; .* --fresh"):
            keep_own_checkpoints(tmp_path, "pretrain", {}, print)
        assert checkpoint.is_dir()

    def test_nothing_set_aside_before_is_lost(self, tmp_path):
        for _ in range(3):
            cut(make_checkpoint(tmp_path, 10))
            assert keep_own_checkpoints(tmp_path, "pretrain", {}, lambda line: None) == {}
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == [f"damaged-step=000010{end}" for end in ("", ".2", ".3")]


class TestRemoval:
    def test_one_that_is_held_stays_whole(self, tmp_path):
        checkpoint = make_checkpoint(tmp_path, 10)
        with lock_checkpoint(checkpoint), lock_checkpoint(checkpoint):
            assert not remove(checkpoint)
            verify(checkpoint)
        assert remove(checkpoint)

    @pytest.mark.parametrize(("reason", "removed"), [(errno.EACCES, False), (errno.ENOSYS, True)])
    def test_without_a_lock_only_where_there_are_none(self, tmp_path, monkeypatch, reason, removed):
        checkpoint = make_checkpoint(tmp_path, 10)

        def fail(*_):
            raise OSError(reason, os.strerror(reason))

        monkeypatch.setattr("fcntl.flock", fail)
        lock_checkpoint(checkpoint).close()
        assert remove(checkpoint) is removed
        assert checkpoint.exists() is not removed

    def test_the_lock_is_asked_for_on_a_file_that_can_be_written(self, tmp_path, monkeypatch):
        """NFS refuses an exclusive lock on any other."""
        modes = []
        monkeypatch.setattr("fcntl.flock", lambda file, how: modes.append(file.writable()))
        remove(make_checkpoint(tmp_path, 10))
        assert modes == [True]

    def test_one_that_is_gone_cannot_be_held(self, tmp_path):
        checkpoint = make_checkpoint(tmp_path, 10)
        remove(checkpoint)
        with pytest.raises(FileNotFoundError):
            lock_checkpoint(checkpoint)


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    made = make(tmp_path, {10: 0.1})
    (tmp_path / ".step=000020" / "weights").mkdir(parents=True)
    (tmp_path / ".step=000020" / "weights" / "part").write_text("half")
    for name in (".removing-step=000005", "damaged-step=000030", ".snapshots"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").write_text("the user's")
    remove_leftovers(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".snapshots", "damaged-step=000030", "notes.txt", made[10].name]
    remove_leftovers(tmp_path / "nothing")
