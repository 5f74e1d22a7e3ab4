"""metrics.csv: one row for each logged step of a run, over all its starts."""

import csv
import io
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megakit.reporting.files import write_atomically
from megakit.runtime.foreign_files import read_regular_file, reading


@dataclass
class Metrics:
    """One logged step; what was not measured is None.

    Attributes:
        step: Optimizer steps done.
        consumed_samples: Training samples seen, over all ranks.
        train_loss: Of this step's global batch.
        val_loss: Over the validation set, after this step.
        lr: Learning rate of this step.
        grad_norm: Norm of this step's gradient before clipping.
    """

    step: int
    consumed_samples: int
    train_loss: float | None = None
    val_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None


#: Ten million rows: no run logs more.
METRICS_BYTES = 1 << 30
COLUMNS = [column.name for column in fields(Metrics)]


class MetricsFile:
    """Appends rows to metrics.csv, and forgets those that a resumption will repeat.

    Args:
        path: The file; made with its header if it is not there.
        after: The step that the run goes on from: rows of later ones are dropped.
        saved: The copy in the checkpoint that the run goes on from. If it exists, it counts, and
            not what became of `path` since.
        check_place: Raises where `path` does not belong to this run any more; called before each
            row is written.

    Raises:
        UserError: The rows that exist cannot be read.
    """

    def __init__(
        self,
        path: Path,
        after: int = 0,
        saved: Path | None = None,
        check_place: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self.check_place = check_place
        source = saved if saved is not None and saved.exists() else path
        kept = []
        if after and source.exists():
            kept = [row for row in read_metrics(source) if row.step <= after]
        write_atomically(path, _as_csv(kept, header=True))

    def append(self, row: Metrics) -> None:
        """Adds one row at the end."""
        self.check_place()
        with self.path.open("a", newline="") as file:
            file.write(_as_csv([row]))


def read_metrics(path: Path) -> list[Metrics]:
    """All complete rows of a metrics.csv, in order. A row without its line's end is left out.

    Raises:
        UserError: It cannot be read, or is no such file.
    """
    with reading(path, "Remove it, or start over with --fresh."):
        return _parse(read_regular_file(path, METRICS_BYTES).decode())


def _parse(text: str) -> list[Metrics]:
    lines = io.StringIO(text[: text.rfind("\n") + 1], newline="")
    numbers = [
        {key: float(value) if value else None for key, value in row.items()}
        for row in csv.DictReader(lines)
    ]
    return [
        Metrics(int(row.pop("step") or 0), int(row.pop("consumed_samples") or 0), **row)
        for row in numbers
    ]


def _as_csv(rows: list[Metrics], header: bool = False) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if header:
        writer.writeheader()
    for row in rows:
        values = asdict(row)
        # Nine significant figures bring a float32 back exactly.
        writer.writerow(
            {k: format(v, ".9g") if isinstance(v, float) else v for k, v in values.items()}
        )
    return text.getvalue()
