"""metrics.csv: rows that are appended, kept over a resumption, and read back exactly."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megakit.errors import UserError
from megakit.reporting.metrics import (
    Metrics,
    MetricsFile,
    further_columns,
    read_metrics,
)

HEADER = "step,consumed_samples,train_loss,val_loss,lr,grad_norm\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.csv"


def rows(*steps):
    return [Metrics(step, 256 * step, train_loss=step / 64, lr=1e-3) for step in steps]


def write(path, *steps, after=0):
    file = MetricsFile(path, after)
    for row in rows(*steps):
        file.append(row)


def test_what_is_in_the_file(path):
    file = MetricsFile(path)
    file.append(Metrics(1, 256, train_loss=0.5, lr=1e-3, grad_norm=2.0))
    file.append(Metrics(2, 512, val_loss=0.25))
    file.append(Metrics(3, 768))
    assert path.read_text() == f"{HEADER}1,256,0.5,,0.001,2\n2,512,,0.25,,\n3,768,,,,\n"
    assert path.read_bytes().count(b"\r") == 0


def test_rows_are_there_at_once(path):
    """Also for another program that shows the curves."""
    file = MetricsFile(path)
    for step in (1, 2, 3):
        file.append(Metrics(step, 256 * step, train_loss=0.5))
        assert [row.step for row in read_metrics(path)] == list(range(1, step + 1))


def test_float32_comes_back_exactly(path):
    bits = np.random.default_rng(0).integers(0, 2**31, 200, dtype=np.uint32)
    drawn = bits.view(np.float32)
    edges = np.array([0, 1 / 3, 16777217, 1e-45, 3.4028235e38, 1 + 2**-23], np.float32)
    numbers = np.concatenate([drawn[np.isfinite(drawn)], edges, -edges])
    file = MetricsFile(path)
    for step, number in enumerate(numbers, start=1):
        file.append(Metrics(step, 0, train_loss=float(number), grad_norm=float(-number)))
    read = read_metrics(path)
    assert np.array_equal(np.array([row.train_loss for row in read], np.float32), numbers)
    assert np.array_equal(np.array([row.grad_norm for row in read], np.float32), -numbers)


def test_no_numbers_come_back_as_such(path):
    file = MetricsFile(path)
    file.append(Metrics(1, 256, train_loss=math.nan, val_loss=math.inf, grad_norm=-math.inf))
    (row,) = read_metrics(path)
    assert row.train_loss is not None
    assert math.isnan(row.train_loss)
    assert (row.val_loss, row.grad_norm) == (math.inf, -math.inf)


class TestResumption:
    @settings(
        max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(st.sets(st.integers(1, 60)), st.integers(0, 60), st.sets(st.integers(1, 60)))
    def test_rows_up_to_its_step_stay_to_the_byte(self, path, before, after, added):
        """Later ones are dropped; a start from nothing forgets all."""
        kept = sorted(step for step in before if step <= after)
        new = sorted(after + step for step in added)
        write(path, *kept)
        text = path.read_text()
        write(path, *sorted(before))
        write(path, *new, after=after)
        assert read_metrics(path) == rows(*kept, *new)
        assert path.read_text().startswith(text)


def test_a_half_written_last_row_is_none(path):
    """However much of it reached the disk before the kill, short of its end."""
    file = MetricsFile(path)
    whole = Metrics(10, 2560, 0.5, 0.25, 1e-3, 1.25)
    file.append(whole)
    begin = len(path.read_text())
    file.append(Metrics(20, 5120, 0.4375, 0.125, 1e-3, 1.75))
    text = path.read_text()
    for end in range(begin, len(text)):
        path.write_text(text[:end])
        assert read_metrics(path) == [whole], text[begin:end]


class TestTheCopyInACheckpoint:
    @pytest.fixture
    def saved(self, path, tmp_path):
        write(path, 10, 20, 30)
        return path.rename(tmp_path / "saved.csv")

    @pytest.mark.parametrize("meanwhile", [None, "edited", "of another run"])
    def test_it_counts_whatever_became_of_the_file(self, path, saved, meanwhile):
        if meanwhile == "of another run":
            write(path, 1, 2, 3)
        elif meanwhile is not None:
            path.write_text(meanwhile)
        MetricsFile(path, after=20, saved=saved)
        assert read_metrics(path) == rows(10, 20)

    def test_one_that_cannot_be_read(self, path, saved):
        saved.write_text("step,consumed_samples\nten,x\n")
        with pytest.raises(UserError, match=r"saved\.csv: cannot be read"):
            MetricsFile(path, after=20, saved=saved)
        assert not path.exists()


class TestFurtherColumns:
    def test_they_follow_the_fixed_ones_from_when_they_first_appear(self, path):
        file = MetricsFile(path)
        file.append(Metrics(1, 256, train_loss=0.5, values={"train_margin": 1.5}))
        before = path.stat().st_ino
        file.append(Metrics(2, 512, train_loss=0.25, values={"train_margin": 2.5}))
        assert path.stat().st_ino == before  # no row is written twice where no column is new
        file.append(Metrics(3, 768, val_loss=1.0, values={"train_margin": 3.5, "val_top": 0.125}))
        assert path.stat().st_ino != before  # replaced at once, never half rewritten
        assert path.read_text() == (
            HEADER.replace("\n", ",train_margin,val_top\n")
            + "1,256,0.5,,,,1.5,\n2,512,0.25,,,,2.5,\n3,768,,1,,,3.5,0.125\n"
        )
        first, _, last = read_metrics(path)
        assert first.values == {"train_margin": 1.5}
        assert last == Metrics(3, 768, None, 1.0, values={"train_margin": 3.5, "val_top": 0.125})
        assert (last["val_top"], last["val_loss"], last["nothing"]) == (0.125, 1.0, None)
        assert further_columns(read_metrics(path)) == ["train_margin", "val_top"]

    def test_those_of_the_saved_copy_stay(self, path, tmp_path):
        file = MetricsFile(path)
        file.append(Metrics(10, 10, train_loss=0.5))
        file.append(Metrics(20, 20, values={"val_top": 0.1 + 0.2}))
        saved = path.rename(tmp_path / "saved.csv")
        file = MetricsFile(path, after=10, saved=saved)
        assert [row.step for row in file.kept] == [10]
        assert path.read_text() == HEADER.replace("\n", ",val_top\n") + "10,10,0.5,,,,\n"
        file.append(Metrics(20, 20, values={"val_top": 0.1 + 0.2}))
        assert path.read_text() == saved.read_text()

    def test_rewriting_changes_no_value(self, path):
        file = MetricsFile(path)
        numbers = np.random.default_rng(1).normal(size=100).astype(np.float32)
        for step, number in enumerate(numbers.tolist()):
            file.append(Metrics(step, 0, train_loss=number, values={"train_x": number * 1e-20}))
        before = [line + "," for line in path.read_text().splitlines()[1:]]
        file.append(Metrics(100, 0, values={"val_x": math.nan}))
        assert path.read_text().splitlines()[1:-1] == before
