"""predictions.csv and the scores, against values worked out by hand."""

import csv
import math

import numpy as np
import pytest

from megakit.reporting.predictions import (
    Predictions,
    count_confusions,
    shares_of_rows,
    write_predictions,
)
from megakit.reporting.results import Results

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

    def test_a_common_shift_changes_nothing(self):
        rng = np.random.default_rng(0)
        logits = rng.normal(size=(5, 10)).astype(np.float32)
        idx = np.arange(5)
        near = Predictions.from_logits(idx, idx, logits)
        far = Predictions.from_logits(idx, idx, logits + 64)
        assert np.allclose(near.probabilities, far.probabilities, atol=1e-5)
        assert np.allclose(near.probabilities.sum(axis=1), 1, atol=1e-15)


class TestRows:
    def test_counts_by_hand(self):
        counts = count_confusions(np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 2, 1, 1, 1]), 4)
        by_hand = [[2, 0, 1, 0], [0, 2, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
        assert counts.tolist() == by_hand
        shares = [[2 / 3, 0, 1 / 3, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
        assert shares_of_rows(counts).tolist() == shares

    @pytest.mark.parametrize("has_latent", [True, False])
    def test_rows_are_chosen_and_joined(self, has_latent):
        latent = np.arange(12, dtype=np.float32).reshape(4, 3) if has_latent else None
        made = Predictions(np.arange(4), np.arange(4) % 3, np.eye(4), latent)
        joined = Predictions.concatenate([made[np.array([3, 1])], made[np.array([0])]])
        assert len(joined) == 3
        assert joined.idx.tolist() == [3, 1, 0]
        assert joined.label.tolist() == [0, 1, 0]
        assert np.array_equal(joined.probabilities, np.eye(4)[[3, 1, 0]])
        if latent is None or joined.latent is None:
            assert latent is joined.latent
        else:
            assert np.array_equal(joined.latent, latent[[3, 1, 0]])


class TestFile:
    def test_to_the_letter(self, tmp_path):
        path = tmp_path / "predictions.csv"
        write_predictions(path, predictions([1, 0], [[0.25, 0.75], [2 / 3, 1 / 3]]))
        assert path.read_text() == (
            "idx,label,prediction,p0,p1\n0,1,1,0.25,0.75\n1,0,0,0.666667,0.333333\n"
        )
        assert list(tmp_path.iterdir()) == [path]

    def test_it_agrees_with_the_scores(self, tmp_path):
        rng = np.random.default_rng(1)
        made = Predictions.from_logits(
            rng.permutation(50),
            rng.integers(0, 10, 50),
            rng.normal(size=(50, 10)).astype(np.float32),
        )
        write_predictions(tmp_path / "p.csv", made)
        with (tmp_path / "p.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["idx"]) for row in rows] == list(range(50))
        right = [row["label"] == row["prediction"] for row in rows]
        results = Results(50)
        results.add(made)
        assert np.mean(right) == pytest.approx(results.scores()["accuracy"])
        for row in rows:
            shown = [float(row[f"p{k}"]) for k in range(10)]
            assert sum(shown) == pytest.approx(1, abs=1e-5)
            assert shown[int(row["prediction"])] == max(shown)

    def test_another_file_is_replaced(self, tmp_path):
        path = tmp_path / "predictions.csv"
        write_predictions(path, predictions([0] * 9, [[1, 0]] * 9))
        write_predictions(path, predictions([0], [[1, 0]]))
        assert len(path.read_text().splitlines()) == 2

    def test_sources_and_unknown_labels(self, tmp_path):
        """Names of files may hold whatever a table is made of."""
        sources = ["a.png", 'b, "b".png', "c\nd.png"]
        made = predictions([-1, -1, -1], [[1, 0]] * 3)
        write_predictions(tmp_path / "p.csv", made, sources)
        with (tmp_path / "p.csv").open(newline="") as file:
            header, *rows = csv.reader(file)
        assert header == ["idx", "source", "label", "prediction", "p0", "p1"]
        assert [row[1] for row in rows] == sources
        assert [row[2] for row in rows] == [""] * 3
        parts = [made[np.array([0])], made[np.array([1, 2])]]
        write_predictions(tmp_path / "parts.csv", parts, sources)
        assert (tmp_path / "parts.csv").read_bytes() == (tmp_path / "p.csv").read_bytes()

    def test_blocks_that_fail_leave_the_old_file(self, tmp_path):
        path = tmp_path / "predictions.csv"
        path.write_text("old")

        def blocks():
            yield predictions([1], [[0.25, 0.75]])
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write_predictions(path, blocks())
        assert path.read_text() == "old"
