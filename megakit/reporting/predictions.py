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
from megakit.reporting.files import replaced_atomically

#: A column of predictions.csv: one value for each sample.
Column = Sequence[Any] | NDArray[Any]
Columns = Mapping[str, Column]


def count_confusions(
    label: NDArray[np.int64], prediction: NDArray[np.int64], num_classes: int
) -> NDArray[np.int64]:
    """Counts how often each label (row) got each prediction (column), int64 (K, K)."""
    counts = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(counts, (label, prediction), 1)
    return counts


def shares_of_rows(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Divides counts (K, K) by the totals of their rows; a row without samples is 0."""
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares


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
        latents = [part.latent for part in parts if part.latent is not None]
        return cls(
            np.concatenate([part.idx for part in parts]),
            np.concatenate([part.label for part in parts]),
            np.concatenate([part.probabilities for part in parts]),
            np.concatenate(latents) if latents else None,
        )


def write_rows(
    path: Path,
    blocks: Iterable[tuple[NDArray[np.int64], Columns]],
    sources: Sequence[str] | None = None,
) -> None:
    """Writes predictions.csv, and replaces an older file in one step unless there is an error.

    Args:
        path: The file.
        blocks: Blocks of samples in the order of the rows: index and further columns.
        sources: The origin of each sample, for a column `source` after `idx`.
    """
    num_written = 0
    with replaced_atomically(path) as file:
        for idx, further in blocks:
            columns: dict[str, Any] = {"idx": idx.tolist()}
            if sources is not None:
                columns["source"] = sources[num_written : num_written + len(idx)]
            columns |= {name: _cells(name, values, idx) for name, values in further.items()}
            table = io.StringIO()
            writer = csv.writer(table, lineterminator="\n")
            if not num_written:
                writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
            file.write(table.getvalue().encode())
            num_written += len(idx)


def _cells(name: str, values: Column, idx: NDArray[np.int64]) -> Sequence[Any]:
    """Returns the cells of a column; a float gets the shortest text that identifies it."""
    shape = values.shape if isinstance(values, np.ndarray) else (len(values),)
    if shape != idx.shape:
        raise UserError(
            f"column {name!r} of predictions.csv has the shape {shape} for {len(idx)} samples. "
            f"Return one value for each sample, of shape {idx.shape}."
        )
    return values.astype(str).tolist() if isinstance(values, np.ndarray) else values
