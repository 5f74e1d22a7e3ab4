"""A mean over tokens comes out the same however micro batches and ranks share them.

The functions below run in the pool's processes.
"""

import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest

from megakit.testing import distributed_model_parallel_state
from tests.parallel import jobs
from tests.scripts import REPOSITORY

STEPS = 10
TOKENS = str(REPOSITORY / "tests" / "megakit" / "training" / "tokens.py")


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_two_data_parallel_ranks(ranks: Any, num_micro_batches: int) -> None:
    """Through Megatron's schedule alone, against one big batch in plain torch."""
    assert ranks.run(compare, num_micro_batches, world_size=2) == [True, True]


def compare(num_micro_batches: int) -> bool:
    import torch

    with distributed_model_parallel_state():
        tokens = runpy.run_path(TOKENS)  # ranks cannot import it, nor this module
        loss, gradients = tokens["by_megatron"](num_micro_batches)
        total = torch.tensor([1.0])
        torch.distributed.all_reduce(total)
        tokens["assert_as_of_one_big_batch"](loss, gradients)
        return total.item() == 2


@pytest.mark.long
def test_training_is_the_same_under_every_layout(ranks: Any, tmp_path: Path) -> None:
    """Through NeMo's strategy, its pipeline's schedule and validation with padding included."""
    cloudpickle.register_pickle_by_value(jobs)  # see above
    layouts = {
        "1 micro batch": jobs.layout(micro_batches=1),
        "4 micro batches": jobs.layout(micro_batches=4),
        "data": jobs.layout(2),
        "pipeline": jobs.layout(2, pipeline=2),
    }
    losses, validations = {}, {}
    for name, layout in layouts.items():
        folder = tmp_path / name
        results = ranks.run(train, layout, folder, world_size=layout.world_size)
        losses[name] = results[-1].losses
        rows = (folder / "pretrain" / "metrics.csv").read_text().splitlines()
        validations[name] = [float(row.split(",")[3]) for row in rows[1:] if row.split(",")[3]]
    expected, expected_validation = losses["1 micro batch"], validations["1 micro batch"]
    assert len(expected) == STEPS
    assert expected[-1] < expected[0]
    assert len(expected_validation) == 2
    for name in layouts:
        np.testing.assert_allclose(losses[name], expected, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(validations[name], expected_validation, rtol=1e-5, err_msg=name)


def train(layout: Any, folder: Path) -> jobs.Trained:
    from torch import Tensor

    import model_components
    from megakit.training import TokenMeanLossReduction

    class InkLoss(TokenMeanLossReduction):
        """Squared error of inked pixels, of which each image has another number."""

        def token_losses(self, batch: Any, forward_out: Any) -> Tensor:
            target: Tensor = batch["data"].flatten(1)
            return (forward_out["x_hat"].float() - target).square()

        def token_mask(self, batch: Any) -> Tensor:
            ink: Tensor = batch["data"].flatten(1) > 0
            weights = super().token_mask(batch)
            return ink if weights is None else ink * weights.unsqueeze(1)

    config = model_components.PretrainConfig
    build = config.configure_model

    def configure_model(self: Any) -> Any:
        self.calculate_per_token_loss = True
        return build(self)

    with (
        mock.patch.object(config, "configure_model", configure_model),
        mock.patch.object(config, "get_loss_reduction_class", return_value=InkLoss),
    ):
        return jobs.pretrain(layout, folder, STEPS, look_at_samples=False)
