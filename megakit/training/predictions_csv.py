"""Holds the predictions of a classifier, and writes predictions.csv."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.errors import UserError
from megakit.runtime.atomic_files import replaced_atomically

#: Columns of predictions.csv by name: one value for each sample.
Columns = Mapping[str, Sequence[Any] | NDArray[Any]]


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
        shifted = logits.astype(np.float64)
        exponentials = np.exp(shifted - shifted.max(axis=1, keepdims=True))
        probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
        return cls(idx, label, probabilities, latent)[np.argsort(idx, kind="stable")]

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

    def columns(self) -> Columns:
        """Returns the columns of predictions.csv: `label` (empty: unknown), `prediction`, `p0`."""
        shares = enumerate(self.probabilities.T.tolist())
        return {
            "label": [label if label >= 0 else "" for label in self.label.tolist()],
            "prediction": self.prediction.tolist(),
            **{f"p{number}": [format(p, ".6g") for p in of_class] for number, of_class in shares},
        }

    @classmethod
    def concatenate(cls, parts: Sequence["Predictions"]) -> "Predictions":
        """Joins predictions in the order of the parts."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        joined: Any = (None if each[0] is None else np.concatenate(each) for each in columns)
        return cls(*joined)


def count_confusions(predictions: Predictions) -> NDArray[np.int64]:
    """Counts how often each label (row) got each prediction (column), int64 (K, K)."""
    num_classes = predictions.probabilities.shape[1]
    counts = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(counts, (predictions.label, predictions.prediction), 1)
    return counts


def shares_of_rows(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Divides counts (K, K) by the totals of their rows; a row without samples is 0."""
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares


def most_confident_mistakes(predictions: Predictions, most: int = 25) -> NDArray[np.int64]:
    """Returns the wrong rows with the highest probability, highest first."""
    wrong = np.flatnonzero(predictions.prediction != predictions.label)
    order = np.argsort(-predictions.probabilities[wrong].max(axis=1), kind="stable")
    return wrong[order[:most]]


def write_rows(
    path: Path,
    blocks: Iterable[tuple[NDArray[np.int64], Columns]],
    sources: Sequence[str] | None = None,
) -> None:
    """Writes predictions.csv, and replaces an older file in one step unless there is an error.

    Args:
        path: The file.
        blocks: Blocks of samples in the order of the rows: index and further columns. A float gets
            the shortest text that identifies it.
        sources: The origin of each sample, for a column `source` after `idx`.

    Raises:
        UserError: A column has another number of values than there are samples.
    """
    num_written = 0
    with replaced_atomically(path) as file:
        for idx, further in blocks:
            columns: dict[str, Any] = {"idx": idx.tolist()}
            if sources is not None:
                columns["source"] = sources[num_written : num_written + len(idx)]
            for name, values in further.items():
                is_array = isinstance(values, np.ndarray)
                shape = values.shape if isinstance(values, np.ndarray) else (len(values),)
                if shape != idx.shape:
                    raise UserError(
                        f"column {name!r} of predictions.csv has the shape {shape} for {len(idx)} "
                        f"samples. Return one value for each sample, of shape {idx.shape}."
                    )
                columns[name] = np.asarray(values).astype(str) if is_array else values
            table = io.StringIO()
            writer = csv.writer(table, lineterminator="\n")
            if not num_written:
                writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
            file.write(table.getvalue().encode())
            num_written += len(idx)
