"""Scores the predictions of a classifier, and writes predictions.csv."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.reporting.files import write_atomically


def count_confusions(
    label: NDArray[np.int64], prediction: NDArray[np.int64], num_classes: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Counts how often each label (row) got each prediction (column).

    Returns:
        Counts, int64 (K, K), and shares of the row's total, float64 (K, K). The shares of a class
        without samples are 0.
    """
    counts = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(counts, (label, prediction), 1)
    return counts, counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


@dataclass(frozen=True)
class Predictions:
    """Holds a classifier's predictions for N samples, ordered by index.

    Attributes:
        idx: Index of each sample, int64 (N,).
        label: True class, int64 (N,); -1 if unknown.
        probabilities: Probability of each class, float64 (N, classes).
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
        """Orders samples by index, and converts logits (N, classes) to probabilities."""
        order = np.argsort(idx, kind="stable")
        shifted = logits[order].astype(np.float64)
        exponentials = np.exp(shifted - shifted.max(axis=1, keepdims=True))
        probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
        latent = None if latent is None else latent[order]
        return cls(idx[order], label[order], probabilities, latent)

    @property
    def is_labelled(self) -> bool:
        """Tells whether the true class of every sample is known."""
        return bool((self.label >= 0).all())

    @property
    def prediction(self) -> NDArray[np.int64]:
        """Returns the most probable class of each sample, int64 (N,)."""
        return self.probabilities.argmax(axis=1)

    def scores(self) -> dict[str, Any]:
        """Returns accuracy, cross entropy in nats, and the accuracy of each class that occurs.

        If a label is unknown, all values except the number of samples are None.
        """
        if not self.is_labelled:
            unknown = ("accuracy", "cross_entropy", "per_class_accuracy")
            return {"num_samples": len(self.idx), **dict.fromkeys(unknown)}
        right = self.prediction == self.label
        of_label = self.probabilities[np.arange(len(self.label)), self.label]
        smallest = math.ulp(0.0)
        return {
            "num_samples": len(self.label),
            "accuracy": float(right.mean()),
            "cross_entropy": float(-np.log(np.maximum(of_label, smallest)).mean()),
            "per_class_accuracy": {
                str(label): float(right[self.label == label].mean())
                for label in np.unique(self.label)
            },
        }


def write_predictions(
    path: Path, predictions: Predictions, sources: Sequence[str] | None = None
) -> None:
    """Writes `idx,label,prediction,p0,...`, one row for each sample, in one step.

    Args:
        path: The file.
        predictions: The predictions; unknown labels are left empty.
        sources: The origin of each sample, for a column `source` after `idx`.
    """
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    columns: dict[str, Sequence[Any]] = {"idx": predictions.idx.tolist()}
    if sources is not None:
        columns["source"] = sources
    columns["label"] = [label if label >= 0 else "" for label in predictions.label.tolist()]
    columns["prediction"] = predictions.prediction.tolist()
    for number, of_class in enumerate(predictions.probabilities.T.tolist()):
        columns[f"p{number}"] = [format(p, ".6g") for p in of_class]
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    write_atomically(path, table.getvalue())
