"""What the benchmarks share: a table's rows, the machine's name, a section of RESULTS.md."""

import argparse
import datetime
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("RESULTS.md")
#: The folder with MNIST/raw unless --data-dir names another, as for the scripts.
DATA_DIR = Path(os.environ.get("MNIST_DATA_DIR") or "data")
sys.path.insert(0, str(REPOSITORY))


@dataclass
class Row:
    """One line of a table: what was measured, its runs, and what they compare with."""

    what: str
    values: list[float]
    unit: str
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        spread = f"{short(min(self.values))} to {short(max(self.values))}"
        if len(self.values) == 1:
            spread = ""
        return f"| {self.what} | {short(self.median)} {self.unit} | {spread} | {self.note} |"


HEADER = ["| what | median | spread | |", "|---|---|---|---|"]


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def machine(*packages: str, device: Literal["auto", "cpu", "gpu"] = "auto") -> str:
    """What this ran on, for a table's caption."""
    from megakit.checkpoints.manifest import installed_versions
    from megakit.runtime.accelerator import find_accelerator

    found = find_accelerator(device)
    versions = installed_versions()
    versions |= {name: version(name) for name in packages if name not in versions}
    listed = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", *packages))
    where = f"{found.device}, {os.cpu_count()} cores, Linux {platform.machine()}"
    return f"{datetime.date.today()}, {where}, {listed}; median, lowest to highest."


def write_section(name: str, text: str, path: Path = RESULTS) -> None:
    """Puts a text into a file between its section's markers, or at the end."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    section = f"{begin}\n{text}\n{end}"
    whole = path.read_text() if path.exists() else "# Results\n"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if pattern.search(whole):
        whole = pattern.sub(lambda _: section, whole)
    else:
        whole = f"{whole.rstrip()}\n\n{section}\n"
    part = path.with_name(f"{path.name}.part")  # a process that is killed here leaves no half file
    part.write_text(whole)
    part.replace(path)


def parser_of(description: str, needs_images: bool = True) -> argparse.ArgumentParser:
    """Returns a parser of the options that most benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    if needs_images:
        parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--write", action="store_true", help="put the results into RESULTS.md")
    return parser


def publish(name: str, title: str, rows: Iterable[object], to_write: bool, *more: str) -> None:
    """Prints rows under their title and the machine's name; with `--write`, into RESULTS.md, too.

    Args:
        name: The section's name.
        title: Its heading.
        rows: The rows of `HEADER`.
        to_write: Whether `--write` is given.
        more: Lines after the rows.
    """
    caption = machine("nemo_toolkit", "megatron-core")
    text = "\n".join([f"## {title}", "", caption, "", *HEADER, *map(str, rows), *more])
    print(text)
    if to_write:
        write_section(name, text)


def table(header: str, rows: Iterable[str]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    return [header, "|---" * (header.count("|") - 1) + "|", *rows]


class Section:
    """A section of RESULTS.md to which rows come one by one, so that a stop loses none.

    A row replaces the row with the same first cell. The rows in the file stay if what stands above
    the tables is the same: the day, the machine, the versions.

    Args:
        name: The section's name.
        heading: What stands above the tables.
        headers: The first line of each table.
        path: The file; None if nothing is written.
        keeps: Whether rows in the file stay.
    """

    def __init__(
        self, name: str, heading: str, headers: Sequence[str], path: Path | None, keeps: bool
    ) -> None:
        self.name, self.heading, self.path = name, heading, path
        self.tables: dict[str, dict[str, str]] = {header: {} for header in headers}
        whole = path.read_text() if path and path.exists() and keeps else ""
        begin = whole.partition(f"<!-- {name}: begin -->\n{heading}\n\n")[2]
        header = ""
        for line in begin.partition(f"<!-- {name}: end -->")[0].splitlines():
            if line in self.tables:
                header = line
            elif header and line.startswith("| "):
                self.tables[header][_first_cell(line)] = line

    def has(self, header: str, cell: str) -> bool:
        """Returns whether a table has a row with this first cell."""
        return f"| {cell}" in self.tables[header]

    def put(self, header: str, *rows: str) -> None:
        """Puts rows into a table, and writes the section."""
        self.tables[header] |= {_first_cell(row): row for row in rows}
        if self.path is not None:
            write_section(self.name, str(self), self.path)

    def __str__(self) -> str:
        tables = (table(header, rows.values()) for header, rows in self.tables.items() if rows)
        return "\n\n".join([self.heading, *("\n".join(lines) for lines in tables)])


def _first_cell(row: str) -> str:
    return row.split(" | ")[0]
