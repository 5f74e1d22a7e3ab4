"""What is refused of a `predict_step`. Predictions of every layout: tests/parallel."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def predicts(tmp_path: Path) -> Any:
    """Takes what `predict_step` returns for the first of a number of batches."""
    from megakit.training import PredictionWriter

    writer, module = PredictionWriter(tmp_path), mock.Mock()

    def take(returned: Any, num_batches: int = 2) -> None:
        trainer = mock.Mock(num_predict_batches=[num_batches])
        writer.on_predict_start(trainer, module)
        writer.on_predict_batch_end(trainer, module, returned)

    return take


@pytest.mark.parametrize("returned", [{"output": 1, "idx": 2}, torch.ones(4, 3)])
def test_what_a_step_has_to_return(predicts: Any, returned: Any) -> None:
    with pytest.raises(UserError, match=r"^predict_step has to return a dict .* `loss_mask`"):
        predicts(returned)


def test_more_than_memory_is_refused_at_the_first_batch(predicts: Any) -> None:
    batch = {"idx": torch.arange(4), "output": torch.ones(4, 9), "loss_mask": torch.ones(4)}
    told = r"^The predictions need about 8800000\.0 GB of memory, and this machine has"
    with pytest.raises(UserError, match=told):
        predicts(batch, num_batches=10**13)
