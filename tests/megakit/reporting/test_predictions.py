"""predictions.csv and the scores, against values worked out by hand."""

import csv
import math

import numpy as np
import pytest

from megakit.reporting.predictions import (
    Predictions,
    count_confusions,
    shares_of_rows,
    write_rows,
)

THIRDS = np.log(np.array([1, 2, 5], np.float32))  # probabilities 1/8, 2/8, 5/8


def predictions(labels, probabilities):
    return Predictions(
        np.arange(len(labels)), np.array(labels), np.array(probabilities, np.float64)
    )


class TestFromLogits:
    def test_probabilities(self):
        made = Predictions.from_logits(
            np.array([0, 1]), np.array([2, 0]), np.stack([THIRDS, THIRDS[::-1]])
        )
        expected = [[1 / 8, 2 / 8, 5 / 8], [5 / 8, 2 / 8, 1 / 8]]
        assert made.probabilities.dtype == np.float64
        assert np.allclose(made.probabilities, expected, rtol=1e-6)
        assert made.prediction.tolist() == [2, 0]

    def test_ordered_by_index_together_with_all_that_belongs_to_it(self):
        idx = np.array([3, 0, 2, 1])
        logits = np.eye(4, dtype=np.float32)[idx] * 9  # sample n says class n
        made = Predictions.from_logits(idx, idx + 10, logits, logits + 1)
        assert made.latent is not None
        assert np.array_equal(made.latent, np.eye(4) * 9 + 1)
        assert made.idx.tolist() == [0, 1, 2, 3]
        assert made.label.tolist() == [10, 11, 12, 13]
        assert made.prediction.tolist() == [0, 1, 2, 3]

    def test_large_logits_do_not_overflow(self):
        logits = np.array([[1000, 999, -1000], [-3e38, 3e38, 0]], np.float32)
        with np.errstate(over="raise", invalid="raise"):
            made = Predictions.from_logits(np.arange(2), np.zeros(2, int), logits)
        share = 1 / (1 + math.exp(-1))
        expected = np.array([[share, 1 - share, 0], [0, 1, 0]])
        assert np.allclose(made.probabilities, expected)


class TestRows:
    def test_counts_by_hand(self):
        counts = count_confusions(np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 2, 1, 1, 1]), 4)
        by_hand = [[2, 0, 1, 0], [0, 2, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
        assert counts.tolist() == by_hand
        shares = [[2 / 3, 0, 1 / 3, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
        assert shares_of_rows(counts).tolist() == shares


def write(path, *blocks, sources=None):
    write_rows(path, ((block.idx, block.columns()) for block in blocks), sources)


class TestFile:
    def test_to_the_letter(self, tmp_path):
        path = tmp_path / "predictions.csv"
        write(path, predictions([1, 0], [[0.25, 0.75], [2 / 3, 1 / 3]]))
        assert path.read_text() == (
            "idx,label,prediction,p0,p1\n0,1,1,0.25,0.75\n1,0,0,0.666667,0.333333\n"
        )
        assert list(tmp_path.iterdir()) == [path]

    def test_sources_and_unknown_labels(self, tmp_path):
        """Names of files may hold whatever a table is made of."""
        sources = ["a.png", 'b, "b".png', "c\nd.png"]
        made = predictions([-1, -1, -1], [[1, 0]] * 3)
        write(tmp_path / "p.csv", made, sources=sources)
        with (tmp_path / "p.csv").open(newline="") as file:
            header, *rows = csv.reader(file)
        assert header == ["idx", "source", "label", "prediction", "p0", "p1"]
        assert [row[1] for row in rows] == sources
        assert [row[2] for row in rows] == [""] * 3
        parts = [made[np.array([0])], made[np.array([1, 2])]]
        write(tmp_path / "parts.csv", *parts, sources=sources)
        assert (tmp_path / "parts.csv").read_bytes() == (tmp_path / "p.csv").read_bytes()

    def test_blocks_that_fail_leave_the_old_file(self, tmp_path):
        path = tmp_path / "predictions.csv"
        path.write_text("old")

        def blocks():
            yield np.arange(1), predictions([1], [[0.25, 0.75]]).columns()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write_rows(path, blocks())
        assert path.read_text() == "old"
