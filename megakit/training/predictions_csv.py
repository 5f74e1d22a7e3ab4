"""Writes predictions.csv."""

import codecs
import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megakit.errors import UserError
from megakit.runtime.atomic_files import replaced_atomically
from megakit.training.predicted_classes import Predictions


def write_columns(path: Path, columns: Mapping[str, Iterable[Any]]) -> None:
    """Writes a table, and replaces an older file in one step unless there is an error.

    A number of an array gets the shortest text that identifies it.
    """
    with replaced_atomically(path) as file:
        writer = csv.writer(codecs.getwriter("utf-8")(file), lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def columns_of(predictions: Predictions) -> dict[str, Iterable[Any]]:
    """Returns the columns of a classifier: `label` (empty: unknown), `prediction`, `p0`."""
    return {
        "label": ("" if label < 0 else label for label in predictions.label.tolist()),
        "prediction": predictions.prediction.tolist(),
        **{
            f"p{number}": map("%.6g".__mod__, of_class)  # a text at a time: there may be many
            for number, of_class in enumerate(predictions.probabilities.T)
        },
    }


def check_columns(columns: Mapping[str, Any], num_samples: int) -> Mapping[str, Any]:
    """Checks that a function `rows` of a script returned one value for each sample.

    Raises:
        UserError: A column has another shape.
    """
    for name, values in columns.items():
        if np.shape(values) != (num_samples,):
            raise UserError(
                f"column {name!r} of predictions.csv has the shape {np.shape(values)} for "
                f"{num_samples} samples. Return one value for each sample."
            )
    return columns
