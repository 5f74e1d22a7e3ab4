"""Holds what a classifier predicted, with its scores, confusions and mistakes."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megakit.errors import UserError

if TYPE_CHECKING:
    from megakit.training.outputs import Outputs


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
        shares = logits.astype(np.float64)  # changed in place: there may be many samples
        shares -= shares.max(axis=1, keepdims=True)
        np.exp(shares, out=shares)
        shares /= shares.sum(axis=1, keepdims=True)
        return cls(idx, label, shares, latent)

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
        is_right = self.prediction == self.label
        return {
            "accuracy": float(is_right.mean()),
            "cross_entropy": -float(np.log(np.maximum(of_label, math.ulp(0.0))).mean()),
            "per_class_accuracy": {
                str(label): float(is_right[self.label == label].mean())
                for label in np.unique(self.label)
            },
        }


def classify(outputs: "Outputs") -> Predictions:
    """Converts the outputs of a classifier.

    Raises:
        UserError: The outputs are not those of a classifier.
    """
    remedy = (
        "For a model that is no classifier, pass the columns of predictions.csv: "
        "run.finish(trainer, rows=...), without NeMo finish_prediction(..., rows=...)."
    )
    if outputs.output.ndim != 2 or outputs.output.shape[1] < 2:
        shape = ", ".join(["B", *map(str, outputs.output.shape[1:])])
        raise UserError(
            f"The prediction returned 'output' of shape ({shape}), and a classifier returns logits "
            f"(B, classes) of at least two classes. {remedy}"
        )
    if outputs.label is None:
        raise UserError(
            "The prediction returned no 'label', and this script writes a classifier's scores. "
            f"Return the labels, int64 (B,), -1 for an unknown label. {remedy}"
        )
    return Predictions.from_logits(outputs.idx, outputs.label, outputs.output, outputs.latent)
