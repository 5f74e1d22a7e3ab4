"""metrics.csv: rows that are appended, kept over a resumption, and read back exactly."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megakit.errors import UserError
from megakit.runtime.atomic_files import write_atomically
from megakit.training.metrics_csv import Metrics, MetricsFile, further_columns, read_metrics
from tests.disk import Disk

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
    written = [
        Metrics(1, 256, train_loss=0.5, lr=1e-3, grad_norm=2.0),
        Metrics(2, 512, val_loss=0.25),
        Metrics(3, 768, val_loss=math.inf, grad_norm=-math.inf),
    ]
    for number, row in enumerate(written, start=1):
        file.append(row)
        assert read_metrics(path) == written[:number]  # at once, for other programs
    assert path.read_bytes().decode() == f"{HEADER}1,256,0.5,,0.001,2\n2,512,,0.25,,\n" + (
        "3,768,,inf,,-inf\n"
    )


def test_float32_comes_back_exactly(path):
    bits = np.random.default_rng(0).integers(0, 2**31, 200, dtype=np.uint32)
    drawn = bits.view(np.float32)
    edges = np.array([0, 1 / 3, 16777217, 1e-45, 3.4028235e38, 1 + 2**-23], np.float32)
    numbers = np.concatenate([drawn[np.isfinite(drawn)], edges, -edges])
    file = MetricsFile(path)
    for step, number in enumerate(numbers.tolist()):
        file.append(Metrics(step, 0, train_loss=number, values={"train_x": -number}))
    read = read_metrics(path)
    assert np.array_equal(np.array([row.train_loss for row in read], np.float32), numbers)
    assert np.array_equal(np.array([row["train_x"] for row in read], np.float32), -numbers)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sets(st.integers(1, 60)), st.integers(0, 60), st.sets(st.integers(1, 60)))
def test_a_resumption_keeps_the_rows_up_to_its_step_to_the_byte(path, before, after, added):
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
    write(path, 10)
    begin = len(path.read_text())
    MetricsFile(path, after=10).append(Metrics(20, 5120, 0.4375, 0.125, 1e-3, 1.75))
    text = path.read_text()
    for end in range(begin, len(text)):
        path.write_text(text[:end])
        assert read_metrics(path) == rows(10), text[begin:end]


@pytest.mark.parametrize("meanwhile", [None, "edited"])
def test_the_copy_in_a_checkpoint_counts_whatever_became_of_the_file(path, tmp_path, meanwhile):
    write(path, 10, 20, 30)
    saved = path.rename(tmp_path / "saved.csv")
    if meanwhile is not None:
        path.write_text(meanwhile)
    MetricsFile(path, after=20, saved=saved)
    assert read_metrics(path) == rows(10, 20)
    saved.write_text("step,consumed_samples\nten,x\n")
    with pytest.raises(UserError, match=r"saved\.csv: cannot be read"):
        MetricsFile(path, after=20, saved=saved)


def test_further_columns_follow_from_when_they_first_appear(path):
    file = MetricsFile(path)
    file.append(Metrics(1, 256, train_loss=0.5, values={"train_margin": 1.5}))
    file.append(Metrics(2, 512, train_loss=0.25, values={"train_margin": 2.5}))
    file.append(Metrics(3, 768, val_loss=1.0, values={"train_margin": 3.5, "val_top": 0.125}))
    header = HEADER.replace("\n", ",train_margin,val_top\n")
    assert path.read_text() == (
        header + "1,256,0.5,,,,1.5,\n2,512,0.25,,,,2.5,\n3,768,,1,,,3.5,0.125\n"
    )
    assert further_columns(read_metrics(path)) == ["train_margin", "val_top"]


def test_a_rewritten_file_appears_when_it_is_on_the_disk(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    write_atomically(tmp_path / "file.csv", "new")
    assert disk.events == ["flush .file.csv.partial", "rename .file.csv.partial to file.csv"]
