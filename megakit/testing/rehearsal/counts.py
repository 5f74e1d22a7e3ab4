"""Counts kernels, synchronizations, copies and collectives by source line and by step."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

KINDS = ("kernels", "synchronizations", "copies", "bytes", "collectives")
#: A report counts the steps FIRST to LAST. The steps before allocate memory.
FIRST, LAST = 6, 205


class Counts:
    """Counts of one process.

    Attributes:
        total: By kind: kernels, synchronizations of the host with the GPU, copies between host and
            GPU, their bytes, and collectives.
        places: Kernels, synchronizations and copies by (kind, cause, place), from step `FIRST` to
            `LAST`, or of the whole program if it has no training steps. The place is the line
            outside torch, and its caller.
        opened: The GPUs on which this process has opened a context, and where.
        steps: The counts of each training step from `FIRST` to `LAST`.
    """

    def __init__(self, report: Path | None = None) -> None:
        self.total: Counter[str] = Counter()
        self.places: Counter[tuple[str, str, str]] = Counter()
        self.opened: list[str] = []
        self.steps: list[dict[str, int]] = []
        self._report = report
        self._step = 0
        self._before: Counter[str] = Counter()

    def add(self, kind: str, cause: str, number: int = 1) -> None:
        """Counts an event at the current place."""
        self.total[kind] += number
        if self._step <= LAST:
            self.places[kind, cause, place()] += number

    def where(self, kind: str) -> str:
        """Returns a line for each place of a kind, the most frequent first."""
        return "\n".join(
            f"{number} {cause} at {where}"
            for (found, cause, where), number in self.places.most_common()
            if found == kind
        )

    def open(self, gpu: int) -> None:
        """Notes that this process opens a context on a GPU of the machine."""
        self.opened.append(f"GPU {gpu} at {place()}")
        self.write()

    def step(self) -> None:
        """Begins a training step."""
        self._step += 1
        if self._step == FIRST:
            self.places.clear()
        elif FIRST < self._step <= LAST + 1:
            self.steps.append({kind: self.total[kind] - self._before[kind] for kind in KINDS})
            if len(self.steps) % 10 == 0:
                self.write()
        self._before = self.total.copy()

    def write(self) -> None:
        """Writes the report of a process that has opened a GPU to `PID.json` in its folder."""
        if self._report is None or not self.opened:
            return
        steps = max(len(self.steps), 1)
        report = {
            "rank": int(os.environ.get("RANK", "0")),
            "command": [Path(part).name for part in sys.argv[:1]],
            "opened": self.opened,
            "total": self.total,
            "steps": self.steps,
            "places": [
                {"kind": kind, "cause": cause, "place": where, "per_step": number / steps}
                for (kind, cause, where), number in self.places.most_common()
            ],
        }
        self._report.mkdir(parents=True, exist_ok=True)
        path = self._report / f"{os.getpid()}.json"
        path.with_suffix(".part").write_text(json.dumps(report, indent=1))
        path.with_suffix(".part").replace(path)


#: `place` skips the frames of these files.
_FRAMEWORK = ("/torch/", "/lightning/fabric/", "/megakit/testing/rehearsal/", "/contextlib.py")


def place() -> str:
    """Returns the nearest lines of the stack outside torch: `file:line function < its caller`."""
    found: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(found) < 2:
        path = frame.f_code.co_filename
        if not any(part in path for part in _FRAMEWORK):
            name = "/".join(path.split("/")[-2:])
            found.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found)
