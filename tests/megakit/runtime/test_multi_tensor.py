"""Calls for many tensors: they compute, to the bit, what Megatron's loops over tensors compute."""

from typing import Any

import pytest
import torch


@pytest.fixture
def weights() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    found = [
        torch.nn.Parameter(torch.randn(shape, generator=generator))
        for shape in ((5, 3), (7,), (1,), (2, 2, 2))
    ]
    for weight in found:
        weight.grad = torch.randn(weight.shape, generator=generator)
    return found


@pytest.fixture
def modules(megatron: None) -> Any:
    from megatron.core.optimizer import clip_grads, optimizer

    return clip_grads, optimizer


def test_the_norm(modules: Any, weights: list[torch.nn.Parameter]) -> None:
    originals, patched = modules
    grads = [weight.grad for weight in weights]
    assert patched.get_grad_norm_fp32 is not originals.get_grad_norm_fp32
    for tensors in (grads, []):
        expected = originals.get_grad_norm_fp32(tensors)
        assert patched.get_grad_norm_fp32(tensors) == expected
    largest = max(grad.abs().max().item() for grad in grads if grad is not None)
    assert patched.get_grad_norm_fp32(grads, float("inf")) == largest


@pytest.mark.parametrize("norm", [0.5, 3.0])
def test_clipping(modules: Any, weights: list[torch.nn.Parameter], norm: float) -> None:
    originals, patched = modules
    assert patched.clip_grad_by_total_norm_fp32 is not originals.clip_grad_by_total_norm_fp32
    grads: list[Any] = [weight.grad for weight in weights]
    found: list[list[Any]] = []
    for module in (originals, patched):
        copies = [torch.nn.Parameter(weight.detach()) for weight in weights]
        for copy, grad in zip(copies, grads, strict=True):
            copy.grad = grad.clone()
        module.clip_grad_by_total_norm_fp32(copies, 1.0, norm)
        found.append([copy.grad for copy in copies])
    assert all(map(torch.equal, *found))
    assert all(map(torch.equal, found[0], grads)) == (norm < 1)
    patched.clip_grad_by_total_norm_fp32([], 1.0, norm)


def test_copies(modules: Any, weights: list[torch.nn.Parameter]) -> None:
    _, patched = modules
    sources = [weight.data for weight in weights]
    targets = [torch.zeros_like(source, dtype=torch.bfloat16) for source in sources]
    patched._multi_tensor_copy_this_to_that(sources, targets)
    assert all(map(torch.equal, targets, [source.bfloat16() for source in sources]))
    patched._multi_tensor_copy_this_to_that([], [])
