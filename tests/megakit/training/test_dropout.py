"""The random numbers of dropout depend on the step; in trainings: tests/parallel."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def drawn() -> Any:
    """Numbers that a rank draws after its generators were seeded for a step."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megakit.training.dropout import seed_generators

    def draw(seed: int, step: int, stage: int = 0, data_rank: int = 0) -> list[float]:
        ranks = {"pipeline_model_parallel": stage, "data_parallel": data_rank}
        with pytest.MonkeyPatch.context() as patch:
            for kind, rank in ranks.items():
                patch.setattr(parallel_state, f"get_{kind}_rank", lambda rank=rank: rank)
            seed_generators(seed, step)
            numbers = torch.rand(2).tolist()
            with get_cuda_rng_tracker().fork():
                return [*numbers, *torch.rand(2).tolist()]

    return draw


def test_each_step_and_place_has_its_own_numbers(drawn: Any) -> None:
    arguments = [(1, 0), (1, 1), (2, 0), (1, 0, 1), (1, 0, 0, 1), (1, 0, 1, 1)]
    numbers = [number for chosen in arguments for number in drawn(*chosen)]
    assert len(set(numbers)) == len(numbers) == 24
    assert numbers == [number for chosen in arguments for number in drawn(*chosen)]
