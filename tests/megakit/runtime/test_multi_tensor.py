"""Calls for many tensors: they compute, to the bit, what Megatron's loops over tensors compute."""

from typing import Any

import pytest
import torch


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in ((5, 3), (7,), (1,), (2, 2, 2))]


@pytest.fixture
def modules(megatron: None) -> Any:
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer

    return clip_grads, optimizer, utils


def test_the_norm(modules: Any, tensors: list[torch.Tensor]) -> None:
    clip_grads, _, utils = modules
    expected, _ = utils.local_multi_tensor_l2_norm(1, torch.zeros(1), [tensors], False)
    found, _ = clip_grads.l2_norm_impl(1, torch.zeros(1), [tensors], False)
    assert clip_grads.l2_norm_impl is not utils.local_multi_tensor_l2_norm
    assert torch.equal(found, expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_clipping(modules: Any, tensors: list[torch.Tensor]) -> None:
    clip_grads, _, utils = modules
    expected = [tensor.clone() for tensor in tensors]
    utils.local_multi_tensor_scale(1, torch.zeros(1), [expected, expected], 0.3)
    clip_grads.multi_tensor_scale_impl(1, torch.zeros(1), [tensors, tensors], 0.3)
    assert clip_grads.multi_tensor_scale_impl is not utils.local_multi_tensor_scale
    assert all(map(torch.equal, tensors, expected))
    clip_grads.multi_tensor_scale_impl(1, torch.zeros(1), [[], []], 0.5)


def test_copies(modules: Any, tensors: list[torch.Tensor]) -> None:
    _, optimizer, _ = modules
    targets = [torch.zeros_like(tensor, dtype=torch.bfloat16) for tensor in tensors]
    optimizer._multi_tensor_copy_this_to_that(tensors, targets)
    assert all(map(torch.equal, targets, [tensor.bfloat16() for tensor in tensors]))
    optimizer._multi_tensor_copy_this_to_that([], [])
