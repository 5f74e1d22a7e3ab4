"""What the benchmarks share: a table's rows, the machine's name, a section of RESULTS.md.

    python benchmarks/report.py NAME < TEXT

writes a section of RESULTS.md.
"""

import datetime
import os
import platform
import re
import statistics
import sys
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
    path.write_text(whole)


if __name__ == "__main__":
    write_section(sys.argv[1], sys.stdin.read().strip())
