"""Megatron's linear layers start as torch's do, by name and seed alone, and compute the same."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("megatron")

kinds = pytest.mark.parametrize("kind", ["column", "row"])


def layer(kind: str, name: str = "layer", seed: int = 1, sizes: tuple[int, int] = (30, 20)) -> Any:
    from megakit import models
    from tests.megakit.models.networks import NetConfig

    return getattr(models, f"{kind}_parallel_linear")(NetConfig(seed=seed), *sizes, name)


def same(one: Any, other: Any) -> bool:
    return torch.equal(one.weight, other.weight) and torch.equal(one.bias, other.bias)


@kinds
def test_first_weights_belong_to_seed_and_name(kind: str) -> None:
    first = layer(kind)
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    assert same(layer(kind), first)
    assert not same(layer(kind, "another"), first)
    assert not same(layer(kind, seed=2), first)
    assert torch.equal(torch.rand(3), expected)  # torch's generator is as before


@kinds
def test_first_weights_are_spread_as_in_torch(kind: str) -> None:
    """`nn.Linear` draws weight and bias evenly from within 1 / sqrt(in) of 0."""
    made = layer(kind, sizes=(25, 4000))
    bound = 1 / math.sqrt(25)
    for values in (made.weight, made.bias):
        assert 0.99 * bound < values.max() <= bound
        assert -bound <= values.min() < -0.99 * bound
        assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not torch.equal(made.weight[:, 0], made.bias)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_a_linear_layer(kind: str, dtype: torch.dtype) -> None:
    made = layer(kind).to(dtype)
    assert (made.in_features, made.out_features) == (30, 20)
    x = torch.randn(7, 30, dtype=dtype, requires_grad=True)
    output, bias = made(x)
    expected = functional.linear(x, made.weight, made.bias)
    assert bias is None
    torch.testing.assert_close(output, expected)
    inputs, upstream = (x, made.weight, made.bias), torch.randn(7, 20, dtype=dtype)
    found, wanted = (torch.autograd.grad(out, inputs, upstream) for out in (output, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
