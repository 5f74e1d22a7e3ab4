"""Holds what a classifier predicted, with its scores, confusions and mistakes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Predictions:
    """Holds a classifier's predictions for N samples.

    Attributes:
        idx: Index of each sample, int64 (N,).
        label: True class, int64 (N,); -1 if unknown.
        probabilities: Probability of each class, float64 (N, K).
        latent: Latent point of each sample, float32 (N, dimensions), or None.
    """

    idx: NDArray[np.int64]
    label: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    latent: NDArray[np.float32] | None = None

    @classmethod
    def from_logits(
        cls,
        idx: NDArray[np.int64],
        label: NDArray[np.int64],
        logits: NDArray[np.float32],
        latent: NDArray[np.float32] | None = None,
    ) -> "Predictions":
        """Converts logits (N, K) to probabilities."""
        shifted = logits.astype(np.float64)
        exponentials = np.exp(shifted - shifted.max(axis=1, keepdims=True))
        return cls(idx, label, exponentials / exponentials.sum(axis=1, keepdims=True), latent)

    @property
    def is_labelled(self) -> bool:
        """Tells whether the true class of every sample is known."""
        return bool((self.label >= 0).all())

    @property
    def prediction(self) -> NDArray[np.int64]:
        """Returns the most probable class of each sample, int64 (N,)."""
        return self.probabilities.argmax(axis=1)

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.idx)

    def __getitem__(self, rows: NDArray[np.int64]) -> "Predictions":
        """Returns the predictions in some rows, in the order of the rows."""
        latent = None if self.latent is None else self.latent[rows]
        return Predictions(self.idx[rows], self.label[rows], self.probabilities[rows], latent)

    def confusions(self) -> NDArray[np.int64]:
        """Counts how often each label (row) got each prediction (column), int64 (K, K)."""
        num_classes = self.probabilities.shape[1]
        counts = np.zeros((num_classes, num_classes), np.int64)
        np.add.at(counts, (self.label, self.prediction), 1)
        return counts

    def mistakes(self, most: int = 25) -> "Predictions":
        """Returns the wrong predictions with the highest probability, highest first."""
        wrong = np.flatnonzero(self.prediction != self.label)
        order = np.argsort(-self.probabilities[wrong].max(axis=1), kind="stable")
        return self[wrong[order[:most]]]

    def scores(self) -> dict[str, Any]:
        """Returns accuracy, cross entropy in nats, and the accuracy of each class that occurs.

        If a label is unknown, all values are None.
        """
        if not self.is_labelled:
            return dict.fromkeys(("accuracy", "cross_entropy", "per_class_accuracy"))
        of_label = self.probabilities[np.arange(len(self)), self.label]
        confusions = self.confusions()
        right, totals = confusions.diagonal(), confusions.sum(axis=1)
        return {
            "accuracy": float(right.sum() / len(self)),
            "cross_entropy": -float(np.log(np.maximum(of_label, math.ulp(0.0))).mean()),
            "per_class_accuracy": {
                str(label): float(right[label] / totals[label]) for label in np.flatnonzero(totals)
            },
        }


def concatenate(parts: Sequence[Predictions]) -> Predictions:
    """Joins predictions in the order of the parts."""
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    joined: Any = (None if each[0] is None else np.concatenate(each) for each in columns)
    return Predictions(*joined)


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
        counts = block.confusions()
        self.confusions = counts if is_first else self.confusions + counts
        found = block if is_first else concatenate([self.mistakes, block])
        self.mistakes = found.mistakes()

    @property
    def shown(self) -> Predictions:
        """Returns at most `MOST_SHOWN` predictions, evenly selected, ordered by index."""
        return concatenate(self._shown)

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
