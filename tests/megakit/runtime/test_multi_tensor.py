"""Calls for many tensors: they compute what Megatron's loops over tensors compute."""

import math
from typing import Any

import pytest
import torch

from megakit.runtime import multi_tensor

SHAPES = ((5, 3), (7,), (1,), (2, 2, 2))


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.fixture
def loops(megatron: None) -> Any:
    from megatron.core import utils

    return utils


def test_the_norm(loops: Any, tensors: list[torch.Tensor]) -> None:
    flag = torch.zeros(1)
    found, _ = multi_tensor.l2_norm(1, flag, [tensors], False)
    expected, _ = loops.local_multi_tensor_l2_norm(1, flag, [tensors], False)
    assert found.shape == expected.shape == (1,)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    assert found.item() == pytest.approx(math.sqrt(sum(float(t.square().sum()) for t in tensors)))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_scaling(loops: Any, tensors: list[torch.Tensor], kind: torch.dtype) -> None:
    found, expected = ([torch.zeros_like(t, dtype=kind) for t in tensors] for _ in range(2))
    multi_tensor.scale(1, torch.zeros(1), [tensors, found], 0.3)
    loops.local_multi_tensor_scale(1, torch.zeros(1), [tensors, expected], 0.3)
    assert all(map(torch.equal, found, expected))


def test_scaling_nothing() -> None:
    """Megatron's loop does nothing then; torch's functions refuse empty lists."""
    multi_tensor.scale(1, torch.zeros(1), [[], []], 0.5)


class Quantized(torch.Tensor):
    """A weight that converts what is copied into it, as Transformer Engine's FP8 weights do."""

    def copy_(self, source: torch.Tensor, *args: Any) -> Any:
        return super().copy_(source.round(), *args)


def test_copying_to_a_tensor_of_its_own_class(tensors: list[torch.Tensor]) -> None:
    targets = [torch.zeros_like(tensor).as_subclass(Quantized) for tensor in tensors]
    multi_tensor.copy_all(tensors, list(targets))
    assert all(map(torch.equal, targets, [tensor.round() for tensor in tensors]))


def test_megatrons_loops_are_replaced(loops: Any) -> None:
    from megatron.core.optimizer import clip_grads, optimizer

    assert clip_grads.l2_norm_impl is multi_tensor.l2_norm
    assert clip_grads.multi_tensor_scale_impl is multi_tensor.scale
    assert optimizer.multi_tensor_scale_impl is multi_tensor.scale
    assert optimizer._multi_tensor_copy_this_to_that is multi_tensor.copy_all
