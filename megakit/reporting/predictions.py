"""predictions.csv, and what it says about a classifier."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.reporting.files import write_atomically


@dataclass(frozen=True)
class Predictions:
    """What a classifier says of N samples, ordered by their index.

    Attributes:
        idx: Index of each sample, int64 (N,).
        label: True class, int64 (N,).
        probabilities: Of each class, float64 (N, classes).
    """

    idx: NDArray[np.int64]
    label: NDArray[np.int64]
    probabilities: NDArray[np.float64]

    @classmethod
    def from_logits(
        cls, idx: NDArray[np.int64], label: NDArray[np.int64], logits: NDArray[np.float32]
    ) -> "Predictions":
        """Orders samples by index and turns logits (N, classes) into probabilities."""
        order = np.argsort(idx, kind="stable")
        shifted = logits[order].astype(np.float64)
        shifted -= shifted.max(axis=1, keepdims=True)
        exponentials = np.exp(shifted)
        return cls(idx[order], label[order], exponentials / exponentials.sum(axis=1, keepdims=True))

    @property
    def prediction(self) -> NDArray[np.int64]:
        """The likeliest class of each sample, int64 (N,)."""
        return self.probabilities.argmax(axis=1)

    def scores(self) -> dict[str, Any]:
        """Accuracy, cross entropy in nats, and accuracy within each class that occurs."""
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


def write_predictions(path: Path, predictions: Predictions) -> None:
    """Writes `idx,label,prediction,p0,...`, one row for each sample, in one step."""
    num_classes = predictions.probabilities.shape[1]
    header = ["idx", "label", "prediction", *(f"p{k}" for k in range(num_classes))]
    rows = [
        f"{idx},{label},{prediction}," + ",".join([format(p, ".6g") for p in probabilities])
        for idx, label, prediction, probabilities in zip(
            predictions.idx.tolist(),
            predictions.label.tolist(),
            predictions.prediction.tolist(),
            predictions.probabilities.tolist(),
            strict=True,
        )
    ]
    write_atomically(path, "\n".join([",".join(header), *rows]) + "\n")
