"""Sorts rows on disk, an external merge sort: its memory does not grow with the number of rows.

Rows are structured arrays with a field `idx`, int64, by which they are sorted.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

#: Structured array (N,) with a field `idx`.
Rows = NDArray[np.void]

#: Size of a block of rows in bytes. A few blocks are in memory at a time.
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class SortedRun:
    """Describes consecutive rows of a file that are in ascending order of `idx`.

    Attributes:
        path: The file.
        dtype: The type of a row.
        start: The number of the first row in the file.
        stop: The number of the last row, plus 1.
    """

    path: Path
    dtype: np.dtype[Any]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class RowFile:
    """Writes rows to a new file as sorted runs; rows that arrive in order make up a single run.

    Args:
        path: The file. The first rows create the file and its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._pending: list[Rows] = []
        self._pending_bytes = 0
        self._starts: list[int] = []
        self._num_rows, self._last_idx = 0, 0
        self._dtype: np.dtype[Any] = np.dtype("V")

    def append(self, rows: Rows) -> None:
        """Adds rows; a block of rows is sorted and written together.

        Raises:
            FileExistsError: The file exists: another process writes it, or an earlier prediction
                left it.
            TypeError: The type of a row differs from earlier rows.
        """
        if not len(rows):
            return
        self._pending.append(rows)
        self._pending_bytes += rows.nbytes
        if self._pending_bytes >= BLOCK_BYTES:
            self._flush()

    def close(self) -> list[SortedRun]:
        """Writes the remaining rows, closes the file, and returns its runs."""
        if self._pending:
            self._flush()
        if self._file is not None:
            self._file.close()
        return [
            SortedRun(self.path, self._dtype, *ends)
            for ends in itertools.pairwise([*self._starts, self._num_rows])
        ]

    def _flush(self) -> None:
        rows = _sorted(self._pending)
        self._pending, self._pending_bytes = [], 0
        if self._file is None:
            self.path.parent.mkdir(exist_ok=True)
            self._file, self._dtype = self.path.open("xb"), rows.dtype
        if rows.dtype != self._dtype:
            raise TypeError(f"rows of type {rows.dtype} follow rows of type {self._dtype}.")
        if not self._starts or rows["idx"][0] <= self._last_idx:
            self._starts.append(self._num_rows)
        self._file.write(rows.tobytes())
        self._num_rows += len(rows)
        self._last_idx = rows["idx"][-1]


def merge(runs: Sequence[SortedRun]) -> Iterator[Rows]:
    """Yields the rows of all runs in ascending order of `idx`, in blocks of about `BLOCK_BYTES`."""
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb")) for path in {r.path for r in runs}}
        while runs:
            most = max(1, BLOCK_BYTES // (runs[0].dtype.itemsize * len(runs)))
            blocks = [_read(files[run.path], run, most) for run in runs]
            # A run that is not read to its end may continue directly after its block.
            limits = [
                block["idx"][-1]
                for run, block in zip(runs, blocks, strict=True)
                if len(block) < len(run)
            ]
            if limits:
                blocks = [
                    block[: np.searchsorted(block["idx"], min(limits), side="right")]
                    for block in blocks
                ]
            yield _sorted(blocks)
            rests = [
                replace(run, start=run.start + len(block))
                for run, block in zip(runs, blocks, strict=True)
            ]
            runs = [run for run in rests if len(run)]


def _read(file: IO[bytes], run: SortedRun, most: int) -> Rows:
    """Reads the first rows of a run, at most `most`."""
    size = run.dtype.itemsize
    file.seek(run.start * size)
    return np.frombuffer(file.read(min(most, len(run)) * size), run.dtype)


def _sorted(blocks: Sequence[Rows]) -> Rows:
    rows = np.concatenate(blocks)
    in_order: Rows = rows[np.argsort(rows["idx"], kind="stable")]
    return in_order
