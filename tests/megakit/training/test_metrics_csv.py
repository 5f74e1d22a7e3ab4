"""metrics.csv: rows that are appended, kept over a resumption, and read back exactly."""

import math

import numpy as np
import pytest

from megakit.errors import UserError
from megakit.training.metrics_csv import (
    Metrics,
    MetricsFile,
    first_and_last,
    further_columns,
    read_metrics,
)

HEADER = "step,consumed_samples,train_loss,val_loss,lr,grad_norm\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.csv"


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


def test_a_resumption_continues_the_copy_in_the_checkpoint(path, tmp_path):
    """Whatever became of the file; a start from nothing forgets all."""
    first = [
        Metrics(step, 256 * step, train_loss=1 / step, values={"train_x": 1.0}) for step in (1, 2)
    ]
    file = MetricsFile(path)
    for row in first:
        file.append(row)
    text = path.read_text()
    saved = tmp_path / "saved.csv"
    saved.write_text(text)
    path.write_text("edited")
    third = Metrics(3, 768, val_loss=0.5)
    MetricsFile(path, saved).append(third)
    assert path.read_text() == f"{text}3,768,,0.5,,,\n"
    assert read_metrics(path) == [*first, third]
    saved.write_text("step,consumed_samples\nten,x\n")
    with pytest.raises(UserError, match=r"saved\.csv: cannot be read"):
        MetricsFile(path, saved)
    MetricsFile(path)
    assert path.read_text() == HEADER


def test_a_half_written_last_row_is_none(path):
    """However much of it reached the disk before the kill, short of its end."""
    file, first = MetricsFile(path), Metrics(10, 2560, train_loss=0.5)
    file.append(first)
    begin = len(path.read_text())
    file.append(Metrics(20, 5120, 0.4375, 0.125, 1e-3, 1.75))
    text = path.read_text()
    for end in range(begin, len(text)):
        path.write_text(text[:end])
        assert read_metrics(path) == [first], text[begin:end]


def test_further_columns_follow_from_when_they_first_appear(path):
    file = MetricsFile(path)
    file.append(Metrics(1, 256, train_loss=0.5, values={"train_margin": 1.5}))
    file.append(Metrics(2, 512, train_loss=0.25, values={"train_margin": 2.5}))
    file.append(Metrics(3, 768, val_loss=1.0, values={"train_margin": 3.5, "val_top": 0.125}))
    header = HEADER.replace("\n", ",train_margin,val_top\n")
    assert path.read_text() == (
        header + "1,256,0.5,,,,1.5,\n2,512,0.25,,,,2.5,\n3,768,,1,,,3.5,0.125\n"
    )
    rows = read_metrics(path)
    assert further_columns(rows) == ["train_margin", "val_top"]
    assert first_and_last(rows) == {
        "train_loss": {"first": 0.5, "last": 0.25},
        "val_loss": {"first": 1.0, "last": 1.0},
        "train_margin": {"first": 1.5, "last": 3.5},
        "val_top": {"first": 0.125, "last": 0.125},
    }
