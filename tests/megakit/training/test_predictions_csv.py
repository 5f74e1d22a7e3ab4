"""predictions.csv and the scores, against values worked out by hand."""

import csv
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakit.errors import UserError
from megakit.training import classifier as results_module
from megakit.training.classifier import Results
from megakit.training.predictions_csv import (
    Predictions,
    most_confident_mistakes,
    write_rows,
)


def predictions(labels, probabilities):
    return Predictions(
        np.arange(len(labels)), np.array(labels), np.array(probabilities, np.float64)
    )


def results_of(*blocks):
    results = Results(sum(map(len, blocks)))
    for block in blocks:
        results.add(block)
    return results


class TestFromLogits:
    def test_ordered_by_index_together_with_all_that_belongs_to_it(self):
        idx = np.array([3, 0, 2, 1])
        logits = np.log(np.array([1, 2, 5, 2], np.float32))[(np.arange(4) + idx[:, None]) % 4]
        made = Predictions.from_logits(idx, idx + 10, logits, logits + 1)
        assert made.idx.tolist() == [0, 1, 2, 3]
        assert made.label.tolist() == [10, 11, 12, 13]
        assert made.prediction.tolist() == [2, 1, 0, 3]
        assert np.allclose(made.probabilities[0], [0.1, 0.2, 0.5, 0.2], rtol=1e-6)
        assert made.latent is not None
        assert np.array_equal(made.latent, (logits + 1)[[1, 3, 2, 0]])

    def test_large_logits_do_not_overflow(self):
        logits = np.array([[1000, 999, -1000], [-3e38, 3e38, 0]], np.float32)
        with np.errstate(over="raise", invalid="raise"):
            made = Predictions.from_logits(np.arange(2), np.zeros(2, int), logits)
        share = 1 / (1 + math.exp(-1))
        assert np.allclose(made.probabilities, np.array([[share, 1 - share, 0], [0, 1, 0]]))


def write(path, *blocks, sources=None):
    write_rows(path, ((block.idx, block.columns()) for block in blocks), sources)


class TestFile:
    def test_sources_and_unknown_labels_to_the_letter(self, tmp_path):
        """Names of files may hold whatever a table is made of."""
        sources = ["a.png", 'b, "b".png', "c\nd.png"]
        made = predictions([1, 0, -1], [[0.25, 0.75], [2 / 3, 1 / 3], [1, 0]])
        write(tmp_path / "p.csv", made, sources=sources)
        with (tmp_path / "p.csv").open(newline="") as file:
            assert list(csv.reader(file)) == [
                ["idx", "source", "label", "prediction", "p0", "p1"],
                ["0", "a.png", "1", "1", "0.25", "0.75"],
                ["1", 'b, "b".png', "0", "0", "0.666667", "0.333333"],
                ["2", "c\nd.png", "", "0", "1", "0"],
            ]

    def test_blocks_that_fail_leave_the_old_file(self, tmp_path):
        path = tmp_path / "predictions.csv"
        path.write_text("old")
        columns: list[Any] = [{"x": [0.5]}, {"x": np.ones((1, 2))}]
        with pytest.raises(UserError, match=r"column 'x' .* shape \(1, 2\) for 1 samples"):
            write_rows(path, ((np.arange(1), each) for each in columns))
        assert path.read_text() == "old"


class TestScores:
    def test_by_hand(self):
        made = predictions(
            [0, 0, 1, 2], [[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0, 1, 0], [0.25, 0.25, 0.5]]
        )
        results = results_of(made)
        scores = results.scores()
        assert (scores["num_samples"], scores["accuracy"]) == (4, 0.75)
        by_hand = -(math.log(0.5) + math.log(0.1) + math.log(1) + math.log(0.5)) / 4
        assert scores["cross_entropy"] == pytest.approx(by_hand)
        assert scores["per_class_accuracy"] == {"0": 0.5, "1": 1.0, "2": 1.0}
        assert results.confusions.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 1]]

    def test_one_unknown_label_is_enough_for_no_scores(self):
        known, unknown = predictions([0], [[1, 0]]), predictions([-1], [[1, 0]])
        for blocks in ((known, unknown, known), (unknown, known)):
            scores = results_of(*blocks).scores()
            assert scores.pop("num_samples") == len(blocks)
            assert set(scores.values()) == {None}

    def test_the_most_confident_mistakes_come_first(self):
        made = predictions(
            [0, 0, 1, 0, 1], [[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.1, 0.9], [0.3, 0.7]]
        )
        assert most_confident_mistakes(made).tolist() == [3, 1, 2]
        assert most_confident_mistakes(made, most=2).tolist() == [3, 1]

    @given(
        cuts=st.lists(st.integers(1, 59), max_size=5, unique=True),
        seed=st.integers(0, 9),
        most_shown=st.sampled_from([7, 59, 60, 61]),
    )
    def test_blocks_of_any_size_give_the_same(self, cuts, seed, most_shown):
        dice = np.random.default_rng(seed)
        # Probabilities in tenths, so that mistakes tie.
        probabilities = dice.integers(1, 4, (60, 3)) / 10
        whole = Predictions(np.arange(60) * 2, dice.integers(0, 3, 60), probabilities)
        with mock.patch.object(results_module, "MOST_SHOWN", most_shown):
            one = results_of(whole)
            many = results_of(*(whole[rows] for rows in np.split(np.arange(60), sorted(cuts))))
        assert np.array_equal(many.confusions, one.confusions)
        assert many.scores() == {**one.scores(), "cross_entropy": many.scores()["cross_entropy"]}
        assert many.scores()["cross_entropy"] == pytest.approx(one.scores()["cross_entropy"])
        worst = most_confident_mistakes(whole)
        assert many.mistakes.idx.tolist() == one.mistakes.idx.tolist() == (2 * worst).tolist()
        assert many.num_mistakes == (whole.label != whole.prediction).sum()
        shown = np.linspace(0, 59, min(60, most_shown)).astype(int)
        assert many.shown.idx.tolist() == one.shown.idx.tolist() == (2 * shown).tolist()
