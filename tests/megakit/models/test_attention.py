"""Attention by torch's function: Megatron's results, its dropout, and its code where needed."""

from typing import Any
from unittest import mock

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")

S, B, WIDTH = 10, 3, 8


def layers(mask: str = "causal", **fields: Any) -> tuple[Any, Any]:
    """Our layer and Megatron's, of the same config."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megakit.models import ScaledDotProductAttention
    from tests.megakit.models.networks import NetConfig

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    config = NetConfig(**{**sizes, "attention_dropout": 0.0, **fields})
    kinds = (ScaledDotProductAttention, DotProductAttention)
    ours, theirs = (kind(config, 3, AttnMaskType[mask], "self") for kind in kinds)
    return ours, theirs


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(S, B, heads, WIDTH, generator=generator).requires_grad_() for heads in (4, 2, 2)
    ]


def results(layer: Any, qkv: list[torch.Tensor], mask: Any = None) -> list[torch.Tensor]:
    """The output and the gradients of queries, keys and values."""
    torch.manual_seed(2)
    output = layer(*qkv, mask)
    weights = torch.arange(output.numel()).view_as(output).cos()
    return [output, *torch.autograd.grad(output, qkv, weights)]


@pytest.fixture
def sdpa() -> Any:
    """Counts the calls of torch's function."""
    name = "scaled_dot_product_attention"
    function = getattr(torch.nn.functional, name)
    with mock.patch.object(torch.nn.functional, name, wraps=function) as counted:
        yield counted


@pytest.mark.parametrize(("mask", "is_split"), [("causal", False), ("no_mask", True)])
def test_results_are_megatrons_with_the_same_dropout(mask: str, is_split: bool, sdpa: Any) -> None:
    """From Megatron's tracker, unless the sequence is split: then a caller has selected it."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    ours, theirs = layers(mask, attention_dropout=0.5)
    ours.config.sequence_parallel = theirs.config.sequence_parallel = is_split
    qkv, tracker = inputs(), get_cuda_rng_tracker()
    before = tracker.get_states()
    found = []
    for layer in (ours, theirs):
        tracker.set_states(dict(before))
        values = results(layer, qkv)
        found.append((values, torch.get_rng_state(), tracker.get_states()["model-parallel-rng"]))
    tracker.set_states(before)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, found[0][1:], found[1][1:]))
    assert torch.equal(found[0][2], before["model-parallel-rng"]) == is_split
    assert sdpa.call_count == 1
    without = results(layers(mask)[1], qkv)
    assert not torch.allclose(found[0][0][0], without[0])
    torch.testing.assert_close(results(ours.eval(), qkv), without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "fields", "hidden"),
    [("causal", {"window_size": (2, 0)}, 0), ("padding", {}, 0), ("causal", {}, 0.3)],
)
def test_megatrons_code_computes_the_rest(
    kind: str, fields: dict[str, Any], hidden: float, sdpa: Any
) -> None:
    """Windows, kinds of masks that torch's function lacks, and masks that are tensors."""
    ours, theirs = layers(kind, **fields)
    drawn = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(1)) < hidden
    mask = drawn if hidden else None
    assert all(map(torch.equal, results(ours, inputs(), mask), results(theirs, inputs(), mask)))
    assert sdpa.call_count == 0
