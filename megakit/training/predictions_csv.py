"""Writes predictions.csv."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.errors import UserError
from megakit.runtime.atomic_files import replaced_atomically
from megakit.training.classifier import Predictions

#: Columns of predictions.csv by name: one value for each sample.
Columns = Mapping[str, Sequence[Any] | NDArray[Any]]


def columns_of(predictions: Predictions) -> Columns:
    """Returns the columns of a classifier: `label` (empty: unknown), `prediction`, `p0`."""
    shares = enumerate(predictions.probabilities.T.tolist())
    return {
        "label": [label if label >= 0 else "" for label in predictions.label.tolist()],
        "prediction": predictions.prediction.tolist(),
        **{f"p{number}": [format(p, ".6g") for p in of_class] for number, of_class in shares},
    }


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
