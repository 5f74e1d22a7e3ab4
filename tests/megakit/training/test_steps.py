"""What a step computes: Adam's update, and dropout that depends on the step.

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


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.LSTM(4, 4, 2, dropout=0.1), True),
    ],
)
def test_dropout_is_found_and_only_then_generators_are_seeded(
    module: nn.Module, draws: bool
) -> None:
    from megakit.training.dropout import ExactDropout

    callback, model = ExactDropout(), nn.Sequential(module)
    trainer: Any = SimpleNamespace(global_step=3)
    callback.on_train_start(trainer, model)  # type: ignore[arg-type]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    callback.on_train_batch_start(trainer, model, None, 0)
    assert torch.equal(torch.get_rng_state(), before) != draws


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
    from megakit.training.optimizer import FusedAdam

    torchs = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    ours, theirs = adam_steps(FusedAdam, adam_w_mode=adam_w_mode), adam_steps(torchs, fused=True)
    assert all(map(torch.equal, ours, theirs))
