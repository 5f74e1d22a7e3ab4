"""What `predict_step` returns is kept by batch, and returned as one, ordered by index."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")


def of_a_step(idx: Any, **changed: Any) -> Any:
    """What a `predict_step` returns for four samples of five tokens; the last one is padding."""
    mask = torch.ones(4, 5)
    mask[1, 2:] = mask[3] = 0
    idx = torch.tensor(idx)
    logits = idx[:, None, None] * torch.ones(5, 3)
    entries = {"output": logits, "idx": idx, "loss_mask": mask} | changed
    return {name: value for name, value in entries.items() if value is not None}


def predicted(folder: Path, *batches: Any, num_batches: int = 2) -> Any:
    """The outputs of a prediction of these batches."""
    from megakit.training import PredictionWriter

    kept = SimpleNamespace(predictions=[*batches])
    trainer: Any = SimpleNamespace(
        global_rank=0,
        is_global_zero=True,
        world_size=1,
        predict_loop=kept,
        num_predict_batches=[num_batches],
    )
    writer, module = PredictionWriter(folder / "parts"), mock.Mock()
    writer.on_predict_start(trainer, module)
    for number, batch in enumerate(batches):
        writer.on_predict_batch_end(trainer, module, batch, None, number)
    writer.on_predict_end(trainer, module)
    assert kept.predictions == []
    return writer.outputs()


def test_samples_of_all_batches_without_padding(tmp_path: Path) -> None:
    """A mask of tokens tells which samples are real; a label and latent points are optional."""
    found = predicted(tmp_path, of_a_step([7, 2, 9, 0]), of_a_step([8, -1, 3, 0]))
    assert found.idx.tolist() == [-1, 2, 3, 7, 8, 9]
    assert np.array_equal(found.output, found.idx[:, None, None] * np.ones((5, 3)))
    assert (found.label, found.latent) == (None, None)
    coarse = {"output": torch.ones(4, dtype=torch.bfloat16)}
    found = predicted(tmp_path, of_a_step([2, 1, 0, 0], label=torch.arange(4), **coarse))
    assert found.label.tolist() == [2, 1, 0]
    assert (found.output.dtype, found.output.tolist()) == (np.float32, [1, 1, 1])


@pytest.mark.parametrize("returned", [of_a_step([0] * 4, loss_mask=None), torch.ones(4, 3)])
def test_what_a_step_has_to_return(tmp_path: Path, returned: Any) -> None:
    with pytest.raises(UserError, match=r"^predict_step has to return a dict .* `loss_mask`"):
        predicted(tmp_path, returned)


def test_more_than_memory_is_refused_at_the_first_batch(tmp_path: Path) -> None:
    told = r"^The predictions need about 816\d{6}\.\d GB of memory, and this machine has"
    with pytest.raises(UserError, match=told):
        predicted(tmp_path, of_a_step([0, 1, 2, 0]), num_batches=10**15)
