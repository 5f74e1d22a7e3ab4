"""What `predict_step` returns is stored by batch, and read in blocks ordered by index."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")

ROW = np.dtype([("idx", np.int64), ("output", np.float32, (2,))])


def of_a_step(**changed: Any) -> Any:
    """What a `predict_step` returns for four samples of five tokens; the last one is padding."""
    mask = torch.ones(4, 5)
    mask[1, 2:] = mask[3] = 0
    logits = torch.arange(60.0).view(4, 5, 3)
    entries = {"output": logits, "idx": torch.tensor([7, 8, 9, 0]), "loss_mask": mask} | changed
    return {name: value for name, value in entries.items() if value is not None}


def store(folder: Path, *batches: Any) -> Any:
    """The stored outputs of a prediction of these batches."""
    from megakit.training import PredictionWriter

    kept = SimpleNamespace(predictions=[*batches])
    trainer: Any = SimpleNamespace(
        global_rank=0, is_global_zero=True, world_size=1, predict_loop=kept
    )
    writer, module = PredictionWriter(folder / "parts"), mock.Mock()
    writer.on_predict_start(trainer, module)
    for number, batch in enumerate(batches):
        writer.on_predict_batch_end(trainer, module, batch, None, number)
    writer.on_predict_end(trainer, module)
    assert kept.predictions == []
    return writer.outputs()


class TestWriter:
    def test_rows_of_tokens(self, tmp_path: Path) -> None:
        """A mask of tokens tells which samples are real; a label and latent points are optional."""
        stored = store(tmp_path, of_a_step())
        assert len(stored) == 3
        (rows,) = stored
        assert np.array_equal(rows.output, np.arange(45).reshape(3, 5, 3))
        assert rows.idx.tolist() == [7, 8, 9]
        assert (rows.label, rows.latent) == (None, None)
        short = of_a_step(label=torch.arange(4), output=torch.ones(4, dtype=torch.bfloat16))
        (labelled,) = store(tmp_path, short)
        assert labelled.label.tolist() == [0, 1, 2]
        assert (labelled.output.dtype, labelled.output.tolist()) == (np.float32, [1, 1, 1])

    @pytest.mark.parametrize(
        ("returned", "problem"),
        [
            (of_a_step(idx=None), "output, loss_mask without a tensor for idx. Return"),
            (of_a_step(output=torch.ones(5, 4, 3)), r"'output' of shape \(5, 4, 3\) for the 4"),
        ],
    )
    def test_what_a_step_has_to_return(self, tmp_path: Path, returned: Any, problem: str) -> None:
        with pytest.raises(UserError, match=rf"predict_step returned .*{problem}"):
            store(tmp_path, returned)


def rows_of(idx: Any) -> Any:
    rows = np.empty(len(idx), ROW)
    rows["idx"] = idx
    rows["output"] = np.stack([rows["idx"], -rows["idx"]], axis=1)
    return rows


def stored(folder: Path, *ranks: Any) -> Any:
    """The outputs of ranks that predicted samples of these indices."""
    from megakit.training import StoredOutputs

    paths = [folder / f"rank-{rank}" for rank in range(len(ranks))]
    for path, idx in zip(paths, ranks, strict=True):
        rows_of(idx).tofile(path)
    return StoredOutputs(paths, ROW)


def blocks_of(num_rows: int) -> Any:
    from megakit.training import prediction

    return mock.patch.object(prediction, "BLOCK_BYTES", num_rows * ROW.itemsize)


@given(
    num_rows=st.integers(1, 80),
    num_ranks=st.integers(1, 4),
    rows_per_block=st.integers(1, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_order_of_any_ranks(
    num_rows: int, num_ranks: int, rows_per_block: int, seed: int
) -> None:
    dice = np.random.default_rng(seed)
    indices = dice.choice(500, num_rows, replace=False) - 5
    # A rank without samples writes no file.
    ends = np.sort(dice.choice(np.arange(1, num_rows + 1), min(num_ranks, num_rows) - 1, False))
    ranks = [part for part in np.split(indices, ends) if len(part)]
    with tempfile.TemporaryDirectory() as folder, blocks_of(rows_per_block):
        blocks = list(stored(Path(folder), *ranks))
    assert max(len(block.idx) for block in blocks) <= rows_per_block
    joined = rows_of(np.sort(indices))
    for name in ("idx", "output"):
        found = np.concatenate([getattr(block, name) for block in blocks])
        assert np.array_equal(found, joined[name])


@pytest.mark.parametrize("ranks", [([0, 2, 4], [1, 3, 4]), ([0, 1, 1, 2],)])
def test_an_index_that_comes_twice(tmp_path: Path, ranks: Any) -> None:
    with pytest.raises(RuntimeError, match="every sample exactly once"):
        stored(tmp_path, *ranks)
