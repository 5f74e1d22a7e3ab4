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

    config = NetConfig(
        **{"hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0, **fields}
    )
    kinds = (ScaledDotProductAttention, DotProductAttention)
    ours, theirs = (kind(config, 3, AttnMaskType[mask], "self") for kind in kinds)
    return ours, theirs


def inputs(groups: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(S, B, heads, WIDTH, generator=generator).to(dtype).requires_grad_()
        for heads in (4, groups, groups)
    ]


def results(layer: Any, qkv: list[torch.Tensor], mask: Any = None) -> list[torch.Tensor]:
    """The output and the gradients of queries, keys and values."""
    torch.manual_seed(2)
    output = layer(*qkv, mask)
    weights = torch.arange(output.numel()).view_as(output).cos().to(output.dtype)
    return [output, *torch.autograd.grad(output, qkv, weights)]


@pytest.fixture
def sdpa() -> Any:
    """Counts the calls of torch's function."""
    function = torch.nn.functional.scaled_dot_product_attention
    with mock.patch.object(
        torch.nn.functional, "scaled_dot_product_attention", wraps=function
    ) as counted:
        yield counted


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"num_query_groups": 2}, {"num_query_groups": 1}, {"apply_query_key_layer_scaling": True}],
    ids=str,
)
def test_results_are_megatrons(mask: str, fields: dict[str, Any], sdpa: Any) -> None:
    ours, theirs = layers(mask, **fields)
    qkv = inputs(fields.get("num_query_groups", 4))
    torch.testing.assert_close(results(ours, qkv), results(theirs, qkv), rtol=1e-5, atol=1e-6)
    assert sdpa.call_count == 1


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_in_bfloat16(mask: str, sdpa: Any) -> None:
    """Within the rounding of 8 bits, relative to the largest number of each tensor."""
    ours, _ = layers(mask, bf16=True)
    qkv = inputs(dtype=torch.bfloat16)
    exact = results(layers(mask)[1], [tensor.detach().float().requires_grad_() for tensor in qkv])
    for own, reference in zip(results(ours, qkv), exact, strict=True):
        assert own.dtype == torch.bfloat16
        assert (own.float() - reference).abs().max() <= 2**-7 * reference.abs().max()
    assert sdpa.call_count == 1


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("is_split", [False, True], ids=["replicated", "sequence-parallel"])
def test_dropout_draws_megatrons_numbers(mask: str, is_split: bool, sdpa: Any) -> None:
    """From Megatron's tracker, unless the sequence is split: then a caller has selected it."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    ours, theirs = layers(mask, attention_dropout=0.5)
    for layer in (ours, theirs):
        layer.config.sequence_parallel = is_split
    qkv, tracker = inputs(), get_cuda_rng_tracker()
    before = tracker.get_states()
    found = []
    for layer in (ours, theirs, ours):
        tracker.set_states(dict(before))
        values = results(layer, qkv)
        found.append((values, torch.get_rng_state(), tracker.get_states()["model-parallel-rng"]))
    tracker.set_states(before)
    for values, default, tracked in found[1:]:
        torch.testing.assert_close(values, found[0][0], rtol=1e-5, atol=1e-6)
        assert torch.equal(default, found[0][1])
        assert torch.equal(tracked, found[0][2])
    assert torch.equal(found[0][2], before["model-parallel-rng"]) == is_split
    without = results(layers(mask)[0], qkv)
    assert not torch.allclose(found[0][0][0], without[0])
    ours.eval()
    torch.testing.assert_close(results(ours, qkv), without)
    assert sdpa.call_count == 4


@pytest.mark.parametrize(
    ("mask", "fields"),
    [
        ("causal", {"window_size": (2, 0)}),
        ("padding", {}),
    ],
)
def test_megatrons_code_computes_the_rest(mask: str, fields: dict[str, Any], sdpa: Any) -> None:
    ours, theirs = layers(mask, **fields)
    assert all(map(torch.equal, results(ours, inputs()), results(theirs, inputs())))
    assert sdpa.call_count == 0


def test_a_mask_tensor_is_megatrons_work(sdpa: Any) -> None:
    ours, theirs = layers()
    hidden = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(1)) < 0.3
    expected = results(theirs, inputs(), hidden)
    assert all(map(torch.equal, results(ours, inputs(), hidden), expected))
    assert not torch.allclose(expected[0], results(ours, inputs())[0])
    assert sdpa.call_count == 1


def test_transformers_use_it() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    from megakit.models import ScaledDotProductAttention, transformer_layer_spec

    spec = transformer_layer_spec(AttnMaskType.causal)
    core = spec.submodules.self_attention.submodules.core_attention
    assert core is ScaledDotProductAttention
