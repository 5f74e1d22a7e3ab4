"""A mean over tokens comes out the same however micro batches and ranks share them.

The functions below run in the pool's processes.
"""

import runpy
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest

from megakit.testing import distributed_model_parallel_state
from tests.parallel import token_jobs
from tests.scripts import REPOSITORY

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
    cloudpickle.register_pickle_by_value(token_jobs)  # see above
    ((initial, _),) = ranks.run(token_jobs.exact, world_size=1)
    found = {}
    for name in ("one micro batch", "other micro batches", "dp2", "pp2-dp2"):
        sizes, folder = token_jobs.layout(name), tmp_path / name
        logged = ranks.run(token_jobs.train, sizes, folder, world_size=sizes.world_size)
        found[name] = [one["val_loss"] for one in logged]
    (expected,) = found["one micro batch"]
    assert expected < 0.98 * initial
    for name, losses in found.items():
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=name)
