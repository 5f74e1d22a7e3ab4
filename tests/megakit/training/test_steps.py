"""What a step computes: Adam's update, and random numbers that depend on the step.

In trainings and resumptions: tests/parallel and tests/faults.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def drawn() -> Any:
    """Numbers that a rank draws after its generators were seeded for a step."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megakit.training.step_seeds import seed_generators

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


def test_a_step_draws_the_same_whatever_the_model_is_and_was_drawn_before() -> None:
    """As after a resumption. A CUDA graph refuses models that draw."""
    from megakit.nemo.callbacks import StepSeeds

    def drawn_in(step: int, step_graph: Any = None) -> list[float]:
        trainer: Any = SimpleNamespace(
            global_step=step, strategy=SimpleNamespace(step_graph=step_graph)
        )
        StepSeeds().on_train_batch_start(trainer, nn.Linear(1, 1), None, 0)
        return [float(torch.randn_like(torch.zeros(()))) for _ in range(2)]

    third, fourth = drawn_in(3), drawn_in(4)
    assert third == drawn_in(3)
    assert len({*third, *fourth}) == 4
    assert drawn_in(3, step_graph="any") != third


def adam_steps(kind: Any, **options: Any) -> list[torch.Tensor]:
    """Weights in two groups, and their moments, after steps with gradients drawn by the step."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((64, 50), (50,), (3, 64), (1,))
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    groups = [
        {"params": weights[:2], "weight_decay": 0.1},
        {"params": weights[2:], "weight_decay": 0.0},
        {"params": [nn.Parameter(torch.ones(1))], "weight_decay": 0.0},  # without a gradient
        {"params": []},  # as on a rank whose shard has no weights of the group
    ]
    adam = kind(groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01, **options)
    for step in range(60):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        for group in adam.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        adam.step()
    moments = [adam.state[weight][name] for weight in weights for name in ("exp_avg", "exp_avg_sq")]
    return [*weights, *moments]


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_its_steps_are_those_of_torchs_fused_adam_bit_by_bit(adam_w_mode: bool) -> None:
    from megakit.runtime.fused_adam import FusedAdam

    torchs = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    ours, theirs = adam_steps(FusedAdam, adam_w_mode=adam_w_mode), adam_steps(torchs, fused=True)
    assert all(map(torch.equal, ours, theirs))
