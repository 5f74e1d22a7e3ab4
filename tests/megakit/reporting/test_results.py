"""Results of a classifier, against values worked out by hand and against one single block."""

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakit.reporting import results as results_module
from megakit.reporting.figures import most_confident_mistakes
from megakit.reporting.predictions import Predictions
from megakit.reporting.results import Results


def predictions(labels: Any, probabilities: Any) -> Predictions:
    return Predictions(
        np.arange(len(labels)), np.array(labels), np.array(probabilities, np.float64)
    )


def results_of(*blocks: Predictions) -> Results:
    results = Results(sum(map(len, blocks)))
    for block in blocks:
        results.add(block)
    return results


class TestScores:
    def test_by_hand(self):
        made = predictions(
            [0, 0, 1, 2], [[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0, 1, 0], [0.25, 0.25, 0.5]]
        )
        scores = results_of(made).scores()
        assert scores["num_samples"] == 4
        assert scores["accuracy"] == 0.75
        by_hand = -(math.log(0.5) + math.log(0.1) + math.log(1) + math.log(0.5)) / 4
        assert scores["cross_entropy"] == pytest.approx(by_hand)
        assert scores["per_class_accuracy"] == {"0": 0.5, "1": 1.0, "2": 1.0}

    def test_a_probability_of_zero_costs_much_but_not_infinitely_much(self):
        scores = results_of(predictions([1], [[1.0, 0.0]])).scores()
        assert 700 < scores["cross_entropy"] < math.inf

    def test_one_unknown_label_is_enough_for_no_scores(self):
        known, unknown = predictions([0], [[1, 0]]), predictions([-1], [[1, 0]])
        for blocks in ((known, unknown, known), (unknown, known), (known, unknown)):
            results = results_of(*blocks)
            assert not results.is_labelled
            scores = results.scores()
            assert scores.pop("num_samples") == len(blocks)
            assert set(scores.values()) == {None}


@given(
    cuts=st.lists(st.integers(1, 59), max_size=5, unique=True),
    seed=st.integers(0, 9),
    most_shown=st.sampled_from([7, 59, 60, 61]),
)
def test_blocks_of_any_size_give_the_same(cuts: list[int], seed: int, most_shown: int) -> None:
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
    worst = most_confident_mistakes(whole.label, whole.probabilities)
    assert len(worst) == 25
    assert many.mistakes.idx.tolist() == one.mistakes.idx.tolist() == (2 * worst).tolist()
    assert many.num_mistakes == (whole.label != whole.prediction).sum()
    shown = np.linspace(0, 59, min(60, most_shown)).astype(int)
    assert many.shown.idx.tolist() == one.shown.idx.tolist() == (2 * shown).tolist()
    assert len(set(shown)) == min(60, most_shown)
