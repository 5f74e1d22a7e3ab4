"""predictions.csv, and what it says about a classifier."""

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
    """How often each class (a row) was taken for each (a column).

    Returns:
        Counts, int64, and their shares of the row, 0 where a class has no sample; both (K, K).
    """
    counts = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(counts, (label, prediction), 1)
    return counts, counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


@dataclass(frozen=True)
class Predictions:
    """What a classifier says of N samples, ordered by their index.

    Attributes:
        idx: Index of each sample, int64 (N,).
        label: True class, int64 (N,); -1 where nobody knows.
        probabilities: Of each class, float64 (N, classes).
        latent: Where the model places each sample, float32 (N, dimensions), or None.
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
        """Orders samples by index and turns logits (N, classes) into probabilities."""
        order = np.argsort(idx, kind="stable")
        shifted = logits[order].astype(np.float64)
        shifted -= shifted.max(axis=1, keepdims=True)
        exponentials = np.exp(shifted)
        return cls(
            idx[order],
            label[order],
            exponentials / exponentials.sum(axis=1, keepdims=True),
            None if latent is None else latent[order],
        )

    @property
    def is_labelled(self) -> bool:
        """Whether the true class of every sample is known."""
        return bool((self.label >= 0).all())

    @property
    def prediction(self) -> NDArray[np.int64]:
        """The likeliest class of each sample, int64 (N,)."""
        return self.probabilities.argmax(axis=1)

    def scores(self) -> dict[str, Any]:
        """Accuracy, cross entropy in nats, and accuracy within each class that occurs.

        Without labels all but the number of samples is None.
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
        predictions: What it shall hold; labels that nobody knows are left empty.
        sources: Where each sample comes from, for a column `source` after `idx`.
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
