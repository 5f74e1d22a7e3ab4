"""predictions.csv and the scores, against values worked out by hand."""

import csv
import math

import numpy as np

from megakit.training import Predictions
from megakit.training.predictions_csv import columns_of, write_columns


def predictions(labels, probabilities):
    return Predictions(
        np.arange(len(labels)), np.array(labels), np.array(probabilities, np.float64)
    )


def test_large_logits_do_not_overflow():
    logits = np.array([[1000, 999], [-3e38, 3e38]], np.float32)
    made = Predictions.from_logits(np.arange(2), np.zeros(2, int), logits)
    share = 1 / (1 + math.exp(-1))
    assert np.allclose(made.probabilities, np.array([[share, 1 - share], [0, 1]]))


def test_every_column_to_the_letter(tmp_path):
    """Names of files may hold whatever a table is made of."""
    made = predictions([1, 0, -1], [[0.25, 0.75], [2 / 3, 1 / 3], [1, 0]])
    columns = {
        "idx": made.idx,
        "source": ["a.png", 'b, "b".png', "c\nd\N{LATIN SMALL LETTER E WITH ACUTE}.png"],
        "price": np.array([0.1, 1e16, -3], np.float32),
        **columns_of(made),
    }
    write_columns(tmp_path / "p.csv", columns)
    with (tmp_path / "p.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [
            ["idx", "source", "price", "label", "prediction", "p0", "p1"],
            ["0", "a.png", "0.1", "1", "1", "0.25", "0.75"],
            ["1", 'b, "b".png', "1e+16", "0", "0", "0.666667", "0.333333"],
            ["2", "c\nd\N{LATIN SMALL LETTER E WITH ACUTE}.png", "-3.0", "", "0", "1", "0"],
        ]


def test_scores_by_hand():
    made = predictions(
        [0, 0, 1, 2], [[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0, 1, 0], [0.25, 0.25, 0.5]]
    )
    scores = made.scores()
    by_hand = -(math.log(0.5) + math.log(0.1) + math.log(1) + math.log(0.5)) / 4
    assert math.isclose(scores.pop("cross_entropy"), by_hand)
    assert scores == {"accuracy": 0.75, "per_class_accuracy": {"0": 0.5, "1": 1.0, "2": 1.0}}
    assert made.confusions().tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 1]]


def test_one_unknown_label_is_enough_for_no_scores():
    scores = predictions([0, -1], [[1, 0], [1, 0]]).scores()
    assert scores == dict.fromkeys(("accuracy", "cross_entropy", "per_class_accuracy"))


def test_the_most_confident_mistakes_come_first():
    made = predictions(
        [0, 0, 1, 0, 1], [[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.1, 0.9], [0.3, 0.7]]
    )
    assert made.mistakes().idx.tolist() == [3, 1, 2]
    assert made.mistakes(most=2).idx.tolist() == [3, 1]
