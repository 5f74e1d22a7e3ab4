"""metrics.csv: rows that are appended, and read back exactly. Resumptions: tests/faults."""

import numpy as np
import pytest

from megakit.errors import UserError
from megakit.training.metrics_csv import (
    Metrics,
    MetricsFile,
    further_columns,
    read_metrics,
)

HEADER = "step,consumed_samples,train_loss,val_loss,lr,grad_norm"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.csv"


def test_float32_comes_back_exactly(path):
    bits = np.random.default_rng(0).integers(0, 2**31, 200, dtype=np.uint32)
    drawn = bits.view(np.float32)
    edges = np.array([0, 1 / 3, 16777217, 1e-45, 3.4028235e38, 1 + 2**-23, np.inf], np.float32)
    numbers = np.concatenate([drawn[np.isfinite(drawn)], edges, -edges])
    file = MetricsFile(path)
    for step, number in enumerate(numbers.tolist()):
        file.append(Metrics(step, 0, train_loss=number))
    found = [row.train_loss for row in read_metrics(path)]
    assert np.array_equal(np.array(found, np.float32), numbers)


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


def test_a_copy_in_a_checkpoint_that_cannot_be_read(path):
    path.write_text("step,consumed_samples\nten,x\n")
    with pytest.raises(UserError, match=r"metrics\.csv: cannot be read"):
        MetricsFile(path, path)


def test_further_columns_follow_from_when_they_first_appear(path):
    """All is in the file at once, for other programs."""
    file = MetricsFile(path)
    file.append(Metrics(1, 256, train_loss=0.5, lr=1e-3, values={"train_margin": 1.5}))
    assert path.read_text() == f"{HEADER},train_margin\n1,256,0.5,,0.001,,1.5\n"
    file.append(Metrics(2, 512, val_loss=1.0, values={"train_margin": 3.5, "val_top": 0.125}))
    rows = "1,256,0.5,,0.001,,1.5,\n2,512,,1,,,3.5,0.125\n"
    assert path.read_text() == f"{HEADER},train_margin,val_top\n{rows}"
    assert further_columns(read_metrics(path)) == ["train_margin", "val_top"]
