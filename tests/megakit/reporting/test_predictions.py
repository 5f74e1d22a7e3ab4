"""predictions.csv and the scores, against values worked out by hand."""

import csv
import math

import numpy as np
import pytest

from megakit.reporting.predictions import Predictions, write_predictions

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


class TestScores:
    def test_by_hand(self):
        made = predictions(
            [0, 0, 1, 2], [[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0, 1, 0], [0.25, 0.25, 0.5]]
        )
        scores = made.scores()
        assert scores["num_samples"] == 4
        assert scores["accuracy"] == 0.75
        by_hand = -(math.log(0.5) + math.log(0.1) + math.log(1) + math.log(0.5)) / 4
        assert scores["cross_entropy"] == pytest.approx(by_hand)
        assert scores["per_class_accuracy"] == {"0": 0.5, "1": 1.0, "2": 1.0}

    def test_only_classes_that_occur(self):
        scores = predictions([2, 2], [[0, 0, 1], [1, 0, 0]]).scores()
        assert scores["per_class_accuracy"] == {"2": 0.5}

    def test_a_probability_of_zero_costs_much_but_not_infinitely_much(self):
        scores = predictions([1], [[1.0, 0.0]]).scores()
        assert 700 < scores["cross_entropy"] < math.inf

    def test_certain_and_right_costs_nothing(self):
        assert predictions([0], [[1.0, 0.0]]).scores()["cross_entropy"] == 0

    def test_plain_numbers_for_json(self):
        scores = predictions([0, 1], [[1, 0], [1, 0]]).scores()
        per_class = scores.pop("per_class_accuracy")
        assert {type(value) for value in scores.values()} == {int, float}
        assert {type(key) for key in per_class} == {str}
        assert {type(value) for value in per_class.values()} == {float}


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
        assert np.mean(right) == pytest.approx(made.scores()["accuracy"])
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
        scores = made.scores()
        assert scores.pop("num_samples") == 3
        assert set(scores.values()) == {None}
