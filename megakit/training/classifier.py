"""Accumulates the results of a classifier block by block, for summary.json, figures and reports."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.training.predictions_csv import Predictions, count_confusions, most_confident_mistakes

#: The largest number of samples that figures and reports show as points.
MOST_SHOWN = 10_000


class Results:
    """Accumulates a classifier's results; memory does not grow with the number of samples.

    If any label is unknown, `scores` has no values, and `confusions` and `mistakes` are incomplete
    or not set.

    Args:
        num_samples: Number of samples in all blocks.

    Attributes:
        num_samples: Number of samples in all blocks.
        is_labelled: Whether the true class of every sample is known.
        confusions: How often each label (row) got each prediction (column), int64 (K, K).
        mistakes: The wrong predictions with the highest probability, highest first, at most 25.
    """

    confusions: NDArray[np.int64]
    mistakes: Predictions

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.is_labelled = True
        self._shown: list[Predictions] = []
        self._rows_shown = np.linspace(0, num_samples - 1, min(num_samples, MOST_SHOWN), dtype=int)
        self._num_added = 0
        self._log_likelihood = 0.0

    def add(self, block: Predictions) -> None:
        """Adds the next block of predictions."""
        is_first, rows = self._num_added == 0, self._rows_shown - self._num_added
        rows = rows[(rows >= 0) & (rows < len(block))]
        if len(rows):
            self._shown.append(block[rows])
        self._num_added += len(block)
        self.is_labelled &= block.is_labelled
        if not self.is_labelled:
            return
        of_label = block.probabilities[np.arange(len(block)), block.label]
        self._log_likelihood += float(np.log(np.maximum(of_label, math.ulp(0.0))).sum())
        counts = count_confusions(block)
        self.confusions = counts if is_first else self.confusions + counts
        found = block if is_first else Predictions.concatenate([self.mistakes, block])
        self.mistakes = found[most_confident_mistakes(found)]

    @property
    def shown(self) -> Predictions:
        """Returns at most `MOST_SHOWN` predictions, evenly selected, ordered by index."""
        return Predictions.concatenate(self._shown)

    @property
    def num_mistakes(self) -> int:
        """Returns the number of wrong predictions."""
        return int(self.confusions.sum() - self.confusions.trace())

    def scores(self) -> dict[str, Any]:
        """Returns accuracy, cross entropy in nats, and the accuracy of each class that occurs.

        If a label is unknown, all values except the number of samples are None.
        """
        if not self.is_labelled:
            unknown = ("accuracy", "cross_entropy", "per_class_accuracy")
            return {"num_samples": self.num_samples, **dict.fromkeys(unknown)}
        right, totals = self.confusions.diagonal(), self.confusions.sum(axis=1)
        return {
            "num_samples": self.num_samples,
            "accuracy": float(right.sum() / self.num_samples),
            "cross_entropy": -self._log_likelihood / self.num_samples,
            "per_class_accuracy": {
                str(label): float(right[label] / totals[label]) for label in np.flatnonzero(totals)
            },
        }
