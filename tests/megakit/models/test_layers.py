"""Megatron's linear layers start as torch's do, by name and seed alone."""

import math
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


def layer(kind: str, name: str = "layer", seed: int = 1, sizes: tuple[int, int] = (30, 20)) -> Any:
    from megakit import models
    from tests.megakit.models.networks import NetConfig

    return getattr(models, f"{kind}_parallel_linear")(NetConfig(seed=seed), *sizes, name)


kinds = pytest.mark.parametrize("kind", ["column", "row"])


def same(one: Any, other: Any) -> bool:
    return torch.equal(one.weight, other.weight) and torch.equal(one.bias, other.bias)


@kinds
def test_first_weights_belong_to_seed_and_name(kind: str) -> None:
    first = layer(kind)
    torch.manual_seed(123)
    layer(kind, "another")
    assert same(layer(kind), first)
    assert not same(layer(kind, "another"), first)
    assert not same(layer(kind, seed=2), first)


@kinds
def test_a_layer_leaves_torchs_generator_alone(kind: str) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    layer(kind)
    assert torch.equal(torch.rand(3), expected)


@kinds
def test_first_weights_are_spread_as_in_torch(kind: str) -> None:
    """`nn.Linear` draws weight and bias evenly from within 1 / sqrt(in) of 0."""
    made = layer(kind, sizes=(25, 4000))
    bound = 1 / math.sqrt(25)
    for values in (made.weight, made.bias):
        assert values.abs().max() <= bound
        assert values.max() > 0.99 * bound
        assert values.min() < -0.99 * bound
        assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not torch.equal(made.weight[:, 0], made.bias)


@kinds
def test_sizes_and_values_are_those_of_a_linear_layer(kind: str) -> None:
    made = layer(kind)
    assert (made.in_features, made.out_features) == (30, 20)
    x = torch.randn(4, 30)
    output, bias = made(x)
    assert bias is None
    expected = torch.nn.functional.linear(x, made.weight, made.bias)
    torch.testing.assert_close(output, expected)
