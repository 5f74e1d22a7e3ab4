"""Megatron's linear layers start as torch's do, by name and seed alone, and give what they give."""

import math
from typing import Any
from unittest import mock

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


# --- Torch's product instead of Megatron's --------------------------------------------------------


def megatrons(made: Any) -> Any:
    """Megatron's class of a layer."""
    from megatron.core.tensor_parallel import layers

    return next(base for base in type(made).__mro__ if base.__module__ == layers.__name__)


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (7, 30), generator=torch.Generator().manual_seed(1))


@kinds
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_output_and_gradients_are_those_of_megatrons_function(
    kind: str, dtype: Any, rounding: float
) -> None:
    """The gradients, from the same one, to the last bit.

    The output, relative to its largest number: torch rounds once, and Megatron twice.
    """
    made = layer(kind).to(dtype)
    x = images().to(dtype).requires_grad_()
    upstream = images(7, 20).to(dtype)
    outputs, gradients = [], []
    for product in (type(made)._forward_impl, megatrons(made)._forward_impl):
        with mock.patch.object(type(made), "_forward_impl", product):
            output, _ = made(x)
        outputs.append(output)
        gradients.append(torch.autograd.grad(output, (x, made.weight, made.bias), upstream))
    assert outputs[0].dtype == dtype
    ours, theirs = outputs
    assert (ours - theirs).abs().max() <= rounding * theirs.abs().max()
    assert all(map(torch.equal, *gradients))
