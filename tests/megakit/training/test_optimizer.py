"""`FusedAdam` by itself; in trainings and resumptions: tests/parallel and tests/faults."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")

STEPS = 500


class Training:
    """Weights in two groups, one weight without a gradient, and gradients drawn by the step."""

    def __init__(self, adam: Any, **options: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        shapes = ((64, 50), (50,), (3, 64), (1,))
        self.weights = [
            torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
        ]
        groups = [
            {"params": self.weights[:2], "weight_decay": 0.1},
            {"params": self.weights[2:], "weight_decay": 0.0},
            {"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": 0.0},
            {"params": []},  # as on a rank whose shard has no weights of the group
        ]
        self.adam = adam(groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01, **options)

    def run(self, first: int, last: int) -> "Training":
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for weight in self.weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            for group in self.adam.param_groups:
                group["lr"] = 1e-2 / (1 + step)
            self.adam.step()
        return self

    def resumed(self, adam: Any) -> "Training":
        other = Training(adam)
        for own, its in zip(self.weights, other.weights, strict=True):
            its.data.copy_(own.data)
        other.adam.load_state_dict(self.adam.state_dict())
        return other

    def check_equal(self, other: "Training") -> None:
        for own, its in zip(self.weights, other.weights, strict=True):
            assert torch.equal(own, its)
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(self.adam.state[own][name], other.adam.state[its][name])


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_its_steps_are_those_of_torchs_fused_adam_bit_by_bit(adam_w_mode: bool) -> None:
    from megakit.training.optimizer import FusedAdam

    torchs = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    ours = Training(FusedAdam, adam_w_mode=adam_w_mode).run(0, STEPS)
    ours.check_equal(Training(torchs, fused=True).run(0, STEPS))
    assert [group["step"] for group in ours.adam.param_groups] == [STEPS] * 4
    # torch's other Adam rounds elsewhere.
    others = Training(torchs).run(0, STEPS)
    for own, its in zip(ours.weights, others.weights, strict=True):
        torch.testing.assert_close(own, its, rtol=0, atol=1e-6)


@pytest.mark.parametrize("step", [0, 1, 11])
def test_it_resumes_exactly(step: int) -> None:
    from megakit.training.optimizer import FusedAdam

    begun = Training(FusedAdam).run(0, step)
    resumed = begun.resumed(FusedAdam)
    assert resumed.adam.state.keys() > set(resumed.weights)
    assert resumed.adam.param_groups[0]["step"] == step
    resumed.run(step, 20).check_equal(Training(FusedAdam).run(0, 20))


def test_megatron_builds_it_as_it_builds_the_one_of_apex() -> None:
    from megatron.core import optimizer
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    from megakit.training.optimizer import FusedAdam, use_fused_adam

    use_fused_adam()
    for is_distributed in (False, True):
        model = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1),
            DistributedDataParallelConfig(use_distributed_optimizer=is_distributed),
            torch.nn.Linear(4, 1),
        )
        config = OptimizerConfig(lr=0.1, use_distributed_optimizer=is_distributed)
        built = optimizer.get_megatron_optimizer(config, [model])
        assert type(built.chained_optimizers[0].optimizer) is FusedAdam


def test_a_resumption_with_the_other_kind_of_optimizer_is_refused() -> None:
    from megakit.errors import UserError
    from megakit.training.optimizer import check_saved_format

    distributed = {"distrib_optim_sharding_type": "fully_reshardable"}
    for metadata, is_distributed in ((None, True), (None, False), ({}, False), (distributed, True)):
        check_saved_format(metadata, is_distributed)
    for metadata, is_distributed in (({}, True), (distributed, False)):
        with pytest.raises(UserError, match=f"use_distributed_optimizer={not is_distributed}"):
            check_saved_format(metadata, is_distributed)
