"""Reads and writes metrics.csv: one row for each logged step, over all starts of a run."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from megakit.errors import reading
from megakit.runtime.atomic_files import write_atomically


@dataclass
class Metrics:
    """Holds the values of one logged step; values that were not measured are None.

    Attributes:
        step: The number of completed optimizer steps.
        consumed_samples: The number of training samples used, over all ranks.
        train_loss: Training loss of this step's global batch.
        val_loss: Loss over the validation set after this step.
        lr: Learning rate of this step.
        grad_norm: Norm of this step's gradient before clipping.
        values: Further values by column: `train_<name>` of this step, `val_<name>` of the
            validation after this step.
    """

    step: int
    consumed_samples: int
    train_loss: float | None = None
    val_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    values: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, column: str) -> float | None:
        """Returns the value of a column; None if the step has no value."""
        return vars(self)[column] if column in COLUMNS else self.values.get(column)


#: The columns of every metrics.csv; further columns follow in order of appearance.
COLUMNS = [column.name for column in fields(Metrics) if column.name != "values"]
#: Columns that are no `train_` or `val_` column.
IN_WORDS = {"lr": "learning rate", "grad_norm": "gradient norm"}


class MetricsFile:
    """Appends rows to metrics.csv.

    Args:
        path: The file, which is rewritten with its header and the saved rows.
        saved: The copy in the checkpoint that the run resumes from; None: the run starts.

    Raises:
        UserError: The saved rows cannot be read.
    """

    def __init__(self, path: Path, saved: Path | None = None) -> None:
        self.path = path
        rows, self._columns = _read(saved) if saved else ([], [*COLUMNS])
        write_atomically(path, _as_csv(rows, self._columns, header=True))

    def append(self, row: Metrics) -> None:
        """Adds one row at the end.

        If the row has columns that the file lacks, the file is rewritten with a longer header.
        """
        if new := [name for name in row.values if name not in self._columns]:
            self._columns += new
            rows = [*read_metrics(self.path), row]
            write_atomically(self.path, _as_csv(rows, self._columns, header=True))
            return
        with self.path.open("a", newline="") as file:
            file.write(_as_csv([row], self._columns))


def further_columns(rows: Iterable[Metrics]) -> list[str]:
    """Returns the columns of rows without the fixed columns, in order of appearance."""
    return list(dict.fromkeys(column for row in rows for column in row.values))


def in_words(column: str) -> str:
    """Returns the name of a column in words, such as `validation loss`."""
    if column in IN_WORDS:
        return IN_WORDS[column]
    part, _, name = column.partition("_")
    return f"{'training' if part == 'train' else 'validation'} {name.replace('_', ' ')}"


def first_and_last(rows: Sequence[Metrics]) -> dict[str, dict[str, float]]:
    """Returns the `first` and `last` value of each loss and each further column."""
    spans: dict[str, dict[str, float]] = {}
    for column in ("train_loss", "val_loss", *further_columns(rows)):
        values = [value for row in rows if (value := row[column]) is not None]
        if values:
            spans[column] = {"first": values[0], "last": values[-1]}
    return spans


def read_metrics(path: Path) -> list[Metrics]:
    """Returns all complete rows of a metrics.csv, in order; a row without line end is left out.

    Raises:
        UserError: The file cannot be read, or is not a metrics.csv.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[list[Metrics], list[str]]:
    """Returns the rows of a metrics.csv, and its columns."""
    with reading(path, "Remove it, or start over with --fresh."):
        text = path.read_bytes().decode()
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        return [_parse(row) for row in reader], [*(reader.fieldnames or COLUMNS)]


def _parse(row: dict[str, str]) -> Metrics:
    numbers = {name: float(text) for name, text in row.items() if text}
    step, consumed_samples = (int(numbers.pop(name)) for name in COLUMNS[:2])
    fixed = {name: numbers.pop(name, None) for name in COLUMNS[2:]}
    return Metrics(step, consumed_samples, **fixed, values=numbers)


def _as_csv(rows: Iterable[Metrics], columns: Sequence[str], header: bool = False) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(columns)
    writer.writerows([_as_text(row[column]) for column in columns] for row in rows)
    return text.getvalue()


def _as_text(value: float | None) -> str:
    # Nine significant figures restore a float32 exactly.
    return format(value, ".9g") if isinstance(value, float) else "" if value is None else str(value)
