"""Choosing a checkpoint: the best, the newest that is whole, and what is swept away."""

import math

import pytest

from megakit.checkpoints.layout import MANIFEST
from megakit.checkpoints.select import (
    best_checkpoint,
    newest_intact_checkpoint,
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
            ({10: 0.1, 20: 0.2, 30: 0.3}, 10),
            ({10: 0.2, 20: 0.1, 30: 0.1}, 20),  # of two equal ones the older
            ({10: None, 20: 0.2, 30: None}, 20),
            ({10: None, 20: None}, 20),
            ({10: 0.0, 20: None}, 10),
            ({999_999: 0.2, 1_000_000: 0.1}, 1_000_000),
        ],
    )
    def test_lowest_validation_loss(self, tmp_path, losses, best):
        made = make(tmp_path, losses)
        assert best_checkpoint(tmp_path) == made[best]

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("first", [True, False])
    def test_a_loss_that_is_no_number_is_not_the_best(self, tmp_path, bad, first):
        losses = {10: bad, 20: 0.5} if first else {10: 0.5, 20: bad}
        made = make(tmp_path, losses)
        assert best_checkpoint(tmp_path) == made[20 if first else 10]

    def test_the_last_where_that_counts(self, tmp_path):
        made = make(tmp_path, {10: 0.1, 20: 0.2})
        assert best_checkpoint(tmp_path, by="last") == made[20]

    def test_none(self, tmp_path):
        assert best_checkpoint(tmp_path) is None
        assert best_checkpoint(tmp_path / "nothing", by="last") is None

    def test_damaged_manifests_are_not_passed_over(self, tmp_path):
        made = make(tmp_path, {10: 0.1, 20: 0.2})
        (made[20] / MANIFEST).write_text("{")
        with pytest.raises(UserError, match=r"step=000020.*damaged"):
            best_checkpoint(tmp_path)

    def test_what_is_not_complete_is_no_candidate(self, tmp_path):
        made = make(tmp_path, {10: 0.2})
        for name in (".step=000020", "damaged-step=000030", ".removing-step=000005"):
            (tmp_path / name).mkdir()
        assert best_checkpoint(tmp_path) == made[10]


class TestNewestIntact:
    def test_the_newest_and_not_the_best(self, tmp_path):
        made = make(tmp_path, {10: 0.1, 20: 0.2})
        lines: list[str] = []
        found = newest_intact_checkpoint(tmp_path, lines.append)
        assert found is not None
        assert (found[0], found[1].step) == (made[20], 20)
        assert lines == []

    def test_none(self, tmp_path):
        assert newest_intact_checkpoint(tmp_path, print) is None

    def test_damaged_newer_ones_are_set_aside(self, tmp_path):
        made = make(tmp_path, {10: 0.1, 20: 0.2, 30: 0.3})
        cut(made[30])
        (made[20] / MANIFEST).unlink()
        lines: list[str] = []
        found = newest_intact_checkpoint(tmp_path, lines.append)
        assert found is not None
        assert found[0] == made[10]
        assert len(lines) == 2
        for line, step in zip(lines, (30, 20), strict=True):
            assert str(made[step]) in line
            assert f"damaged-step=0000{step}" in line
            assert (tmp_path / f"damaged-step=0000{step}" / "weights").is_dir()

    def test_older_damaged_ones_are_left_alone(self, tmp_path):
        made = make(tmp_path, {10: 0.1, 20: 0.2})
        cut(made[10])
        found = newest_intact_checkpoint(tmp_path, print)
        assert found is not None
        assert made[10].is_dir()

    def test_all_are_damaged(self, tmp_path):
        for checkpoint in make(tmp_path, {10: 0.1, 20: 0.2}).values():
            cut(checkpoint)
        assert newest_intact_checkpoint(tmp_path, print) is None
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["damaged-step=000010", "damaged-step=000020"]

    def test_nothing_set_aside_before_is_lost(self, tmp_path):
        for _ in range(3):
            cut(make_checkpoint(tmp_path, 10))
            assert newest_intact_checkpoint(tmp_path, lambda line: None) is None
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == [f"damaged-step=000010{end}" for end in ("", ".2", ".3")]


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    made = make(tmp_path, {10: 0.1})
    (tmp_path / ".step=000020" / "weights").mkdir(parents=True)
    (tmp_path / ".step=000020" / "weights" / "part").write_text("half")
    (tmp_path / ".removing-step=000005").mkdir()
    (tmp_path / "damaged-step=000030").mkdir()
    (tmp_path / "notes.txt").write_text("the user's")
    remove_leftovers(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["damaged-step=000030", "notes.txt", made[10].name]
    remove_leftovers(tmp_path / "nothing")
