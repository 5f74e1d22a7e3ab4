"""Rows in any order, of any number of ranks, come back in the order of their indices."""

import itertools
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakit.reporting import results as results_module
from megakit.reporting.predictions import Predictions, write_predictions
from megakit.reporting.results import Results

pytestmark = pytest.mark.usefixtures("megatron")

ROW = np.dtype([("idx", np.int64), ("label", np.int64), ("output", np.float32, (2,))])


def rows_of(idx: Any) -> Any:
    rows = np.empty(len(idx), ROW)
    rows["idx"], rows["label"] = idx, np.array(idx, int) + 100
    rows["output"] = np.stack([rows["idx"], -rows["idx"]], axis=1)
    return rows


def write(path: Path, *batches: Any) -> list[Any]:
    from megakit.training.sorted_rows import RowFile

    file = RowFile(path)
    for batch in batches:
        file.append(rows_of(batch))
    return file.close()


def read(runs: list[Any]) -> list[Any]:
    from megakit.training.sorted_rows import merge

    return list(merge(runs))


@given(
    num_rows=st.integers(0, 80),
    num_ranks=st.integers(1, 4),
    in_order=st.booleans(),
    rows_per_block=st.integers(1, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_order_of_any_ranks(
    num_rows: int, num_ranks: int, in_order: bool, rows_per_block: int, seed: int
) -> None:
    dice = np.random.default_rng(seed)
    indices = dice.choice(500, num_rows, replace=False) - 5
    batches = np.split(
        np.sort(indices) if in_order else indices, np.sort(dice.integers(0, num_rows + 1, 12))
    )
    rank_of_batch = dice.integers(0, num_ranks, len(batches))
    ranks = [
        [b for b, r in zip(batches, rank_of_batch, strict=True) if r == rank]
        for rank in range(num_ranks)
    ]
    from megakit.training import sorted_rows

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(sorted_rows, "BLOCK_BYTES", rows_per_block * ROW.itemsize),
    ):
        files = [write(Path(folder, str(rank)), *batches) for rank, batches in enumerate(ranks)]
        runs = [run for file in files for run in file]
        blocks = read(runs)
        # Each run has a row at least in each block; the last batch of a block may exceed it.
        assert max(map(len, blocks), default=0) <= max(rows_per_block, len(runs))
    assert np.array_equal(np.concatenate([rows_of([]), *blocks]), rows_of(np.sort(indices)))


def test_an_index_that_comes_twice(tmp_path: Path) -> None:
    from megakit.training import sorted_rows
    from megakit.training.prediction import StoredOutputs

    of_two_ranks = [*write(tmp_path / "a", [0, 2, 4]), *write(tmp_path / "b", [1, 3, 4])]
    of_one_rank = write(tmp_path / "c", [0, 1, 1, 2])
    for runs, rows in itertools.product((of_two_ranks, of_one_rank), (1, 2, 100)):
        with (
            mock.patch.object(sorted_rows, "BLOCK_BYTES", rows * ROW.itemsize),
            pytest.raises(RuntimeError, match="every sample exactly once"),
        ):
            list(StoredOutputs(runs))


def peak_memory(folder: Path, num_rows: int, in_order: bool) -> int:
    """The peak in bytes from the first batch to predictions.csv."""
    from megakit.training.prediction import StoredOutputs

    dice = np.random.default_rng(0)
    order = np.arange(num_rows) if in_order else dice.permutation(num_rows)
    batches = np.array_split(order, num_rows // 50)
    folder.mkdir()
    tracemalloc.start()
    try:
        runs = [
            run for rank in range(2) for run in write(folder / f"rank-{rank}", *batches[rank::2])
        ]
        results = Results(num_rows)

        def blocks() -> Any:
            for block in StoredOutputs(runs):
                assert block.label is not None
                made = Predictions.from_logits(block.idx, block.label % 2, block.output)
                results.add(made)
                yield made

        write_predictions(folder / "predictions.csv", blocks())
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("in_order", [True, False])
def test_memory_does_not_grow(tmp_path: Path, in_order: bool) -> None:
    from megakit.training import sorted_rows

    block = 400 * ROW.itemsize
    with (
        mock.patch.object(sorted_rows, "BLOCK_BYTES", block),
        mock.patch.object(results_module, "MOST_SHOWN", 100),
    ):
        few, many = (peak_memory(tmp_path / str(n), n, in_order) for n in (2_000, 20_000))
    assert len((tmp_path / "20000" / "predictions.csv").read_text().splitlines()) == 20_001
    assert many < few + 100_000  # all rows take 480,000 bytes, and ten times that as text
