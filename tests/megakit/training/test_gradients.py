"""Gradients that autograd adds to Megatron's buffers: the same bits as by Megatron's hooks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


class Model(torch.nn.Module):
    """With a weight that is used twice, a frozen one, and one without a gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tied, self.frozen, self.last, self.unused = (
            torch.nn.Linear(8, 8, dtype=dtype) for _ in range(4)
        )
        self.frozen.requires_grad_(False)
        for weight in self.tied.parameters():  # Megatron marks embeddings and output layers
            weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.tied(x).relu())
        loss: torch.Tensor = self.last(self.tied(hidden)).float().square().mean()
        return loss


def gradients(dtype: torch.dtype, in_buffers: bool, **options: Any) -> tuple[Any, Any]:
    """The buffers after each of two steps of three micro batches, and the model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from megakit.training.gradients import accumulate_in_buffers

    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options),
        Model(dtype),
    )
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def zero_grad() -> None:
        for weight in weights:
            weight.grad = None

    optimizer = SimpleNamespace(zero_grad=zero_grad)
    # Megatron's distributed optimizer has such a view of each weight, which keeps a hook alive.
    view = model.module.last.weight.view(-1)
    if in_buffers:
        accumulate_in_buffers([model], optimizer)
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(2):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for _ in range(3):
            model(torch.randn(16, 8, generator=generator).to(dtype)).backward()
        found.append([weight.main_grad.clone() for weight in weights])
        zero_grad()  # as Megatron's optimizer for bfloat16 does
    assert view.requires_grad
    return found, model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_of_megatrons_hooks_bit_by_bit(dtype: torch.dtype) -> None:
    expected, hooked = gradients(dtype, in_buffers=False)
    found, model = gradients(dtype, in_buffers=True)
    assert hooked.grad_accs
    assert not model.grad_accs
    for step, others in zip(found, expected, strict=True):
        for own, its in zip(step, others, strict=True):
            assert own.dtype == torch.float32
            assert own.numpy().tobytes() == its.numpy().tobytes()
    assert any(own.abs().sum() > 0 for own in found[1])


def test_overlapped_communication_keeps_the_hooks() -> None:
    from megakit.training.gradients import accumulate_in_buffers

    _, model = gradients(torch.float32, in_buffers=False)
    model.ddp_config.overlap_grad_reduce = True
    accumulate_in_buffers([model], SimpleNamespace())
    assert model.grad_accs
