"""Megatron's linear layers start as torch's do, by name and seed alone, and give what they give."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class Products(TorchDispatchMode):
    """Counts what multiplies matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.number += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def megatrons(made: Any) -> Any:
    """Megatron's class of a layer."""
    from megatron.core.tensor_parallel import layers

    return next(base for base in type(made).__mro__ if base.__module__ == layers.__name__)


class Pass:
    """One pass through a layer and back, by our product or Megatron's."""

    def __init__(self, made: Any, x: torch.Tensor, theirs: bool = False) -> None:
        owner = megatrons(made) if theirs else type(made)
        product = owner._forward_impl
        made.zero_grad()
        x.grad = None
        with mock.patch.object(type(made), "_forward_impl", product), Products() as products:
            self.output, _ = made(x)
            self.output.float().square().sum().backward()
        self.products = products.number
        self.gradients = [
            None if tensor.grad is None else tensor.grad.clone()
            for tensor in (x, made.weight, made.bias)
        ]


SHAPES = [(7, 30), (3, 7, 30)]  # Megatron's inputs have three dimensions, ours two


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (7, 30), generator=torch.Generator().manual_seed(1))


def assert_same_in_bfloat16(ours: Pass, theirs: Pass) -> None:
    """Within the rounding of 8 bits, relative to the largest number of each tensor."""
    pairs = zip([ours.output, *ours.gradients], [theirs.output, *theirs.gradients], strict=True)
    for own, their in pairs:
        assert (own.float() - their.float()).abs().max() <= 2**-7 * their.abs().max()


@kinds
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_are_those_of_megatrons_function(kind: str, shape: Any) -> None:
    made = layer(kind)
    x = images(*shape).requires_grad_()
    ours, theirs = Pass(made, x), Pass(made, x, theirs=True)
    torch.testing.assert_close(ours.output, theirs.output, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=1e-6, atol=1e-5)
    if kind == "row":  # its bias comes later; with one, torch rounds once, and Megatron twice
        assert torch.equal(ours.output, theirs.output)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_from_the_same_one_are_the_same_to_the_last_bit(kind: str, dtype: Any) -> None:
    made = layer(kind).to(dtype)
    x = images().to(dtype).requires_grad_()
    upstream = images(7, 20).to(dtype)
    gradients = []
    for product in (type(made)._forward_impl, megatrons(made)._forward_impl):
        with mock.patch.object(type(made), "_forward_impl", product):
            output, _ = made(x)
        gradients.append(torch.autograd.grad(output, (x, made.weight, made.bias), upstream))
    assert all(map(torch.equal, *gradients))


@kinds
def test_in_bfloat16(kind: str) -> None:
    """As `bf16-mixed` has it: weights in bfloat16, which has 8 bits."""
    made = layer(kind).bfloat16()
    x = images().bfloat16().requires_grad_()
    ours, theirs = Pass(made, x), Pass(made, x, theirs=True)
    assert ours.output.dtype == theirs.output.dtype == torch.bfloat16
    assert_same_in_bfloat16(ours, theirs)


@kinds
def test_under_autocast(kind: str) -> None:
    made = layer(kind)
    x = images().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = Pass(made, x), Pass(made, x, theirs=True)
    assert_same_in_bfloat16(ours, theirs)


@kinds
def test_an_input_that_needs_no_gradient_gets_none(kind: str) -> None:
    """Megatron's function computes one all the same."""
    made = layer(kind)
    x = images()
    ours, theirs = Pass(made, x), Pass(made, x, theirs=True)
    assert ours.products == theirs.products - 1 == 2  # forward, and the weight's gradient
    assert x.grad is None
    torch.testing.assert_close(ours.gradients[1:], theirs.gradients[1:], rtol=1e-6, atol=1e-5)


@kinds
def test_frozen_weights(kind: str) -> None:
    made = layer(kind)
    made.weight.requires_grad_(False)
    x = images().requires_grad_()
    ours, theirs = Pass(made, x), Pass(made, x, theirs=True)
    assert made.weight.grad is None
    torch.testing.assert_close(ours.output, theirs.output, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.gradients[0], theirs.gradients[0], rtol=1e-6, atol=1e-5)
    with torch.no_grad():
        assert not made(x)[0].requires_grad


PLAIN = {
    **dict.fromkeys(
        ("gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel"), False
    ),
    **dict.fromkeys(("grad_output_buffer", "wgrad_deferral_limit"), None),
}


@kinds
@pytest.mark.parametrize(
    "asked",
    [
        {"allreduce_dgrad": True},
        {"sequence_parallel": True},
        {"gradient_accumulation_fusion": True},
        {"grad_output_buffer": [], "wgrad_deferral_limit": 0},
        {"what_a_later_version_adds": True},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_only_megatrons_function_can_do(kind: str, asked: dict[str, Any]) -> None:
    made = layer(kind)
    options = {**PLAIN, "bias": made.bias, "tp_group": made.tp_group}
    x = images().requires_grad_()
    with mock.patch.object(megatrons(made), "_forward_impl", return_value="theirs") as function:
        assert torch.is_tensor(made._forward_impl(input=x, weight=made.weight, **options))
        function.assert_not_called()
        options |= asked
        assert made._forward_impl(input=x, weight=made.weight, **options) == "theirs"
        function.assert_called_once_with(input=x, weight=made.weight, **options)
        # Where nobody needs the input's gradient, there is none to send.
        image = made._forward_impl(input=x.detach(), weight=made.weight, **options)
        assert torch.is_tensor(image) == ("allreduce_dgrad" in asked)
