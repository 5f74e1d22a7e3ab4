"""The norm and the clipping of gradients: bit by bit what Megatron's own functions give."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")

SHAPES = ((64, 784), (64,), (3, 64), (3,), (784, 64), ())


def gradients(scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("count", [1, 2, len(SHAPES)])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_the_norm(count: int, scale: float) -> None:
    from megatron.core.utils import local_multi_tensor_l2_norm

    from megakit.runtime import gradients as ours

    tensors = [gradients(scale)[:count]]
    expected, _ = local_multi_tensor_l2_norm(1, None, tensors, False)
    found, _ = ours.l2_norm(1, None, tensors, False)
    assert torch.equal(found, expected)
    assert (found.shape, found.dtype) == ((1,), torch.float32)


@pytest.mark.parametrize("factor", [0.0, 1 / 3, 0.999])
def test_the_clipping(factor: float) -> None:
    from megatron.core.utils import local_multi_tensor_scale

    from megakit.runtime import gradients as ours

    found, expected = gradients(), gradients()
    ours.scale(1, None, [found, found], factor)
    local_multi_tensor_scale(1, None, [expected, expected], factor)
    assert all(map(torch.equal, found, expected))


def test_megatron_measures_and_clips_with_them() -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32

    parameters: list[Any] = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 1)]
    gradients = torch.tensor([2.0, 1.0]), torch.tensor([2.0])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    norm = get_grad_norm_fp32(list(gradients))
    assert norm == 3.0
    clip_grad_by_total_norm_fp32(parameters, 1.5, norm)
    torch.testing.assert_close(torch.cat(gradients), torch.tensor([1.0, 0.5, 1.0]))


@pytest.fixture
def clip_grads(monkeypatch: pytest.MonkeyPatch) -> Any:
    from megatron.core.optimizer import clip_grads

    for name in ("l2_norm_impl", "multi_tensor_scale_impl"):
        monkeypatch.setattr(clip_grads, name, getattr(clip_grads, name))
    return clip_grads


def test_other_implementations_stay(clip_grads: Any) -> None:
    """Transformer Engine's and Apex's go over all weights at once by themselves."""
    from megakit.runtime import gradients as ours

    clip_grads.l2_norm_impl = clip_grads.multi_tensor_scale_impl = theirs = object()
    ours.measure_at_once.__wrapped__()
    assert clip_grads.l2_norm_impl is clip_grads.multi_tensor_scale_impl is theirs


def test_megatrons_own_are_replaced(clip_grads: Any) -> None:
    from megatron.core.utils import local_multi_tensor_l2_norm

    from megakit.runtime import gradients as ours

    clip_grads.l2_norm_impl = local_multi_tensor_l2_norm
    ours.measure_at_once.__wrapped__()
    assert clip_grads.l2_norm_impl is ours.l2_norm
    assert clip_grads.multi_tensor_scale_impl is ours.scale
