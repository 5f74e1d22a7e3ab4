"""Megatron's linear layers and transformers: their first weights, and what they compute."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:Apex is not installed"),
]

kinds = pytest.mark.parametrize("kind", ["column", "row"])


def layer(kind: str, name: str = "layer", seed: int = 1, sizes: tuple[int, int] = (30, 20)) -> Any:
    from megakit import models
    from tests.megakit.models.networks import NetConfig

    return getattr(models, f"{kind}_parallel_linear")(NetConfig(seed=seed), *sizes, name)


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
    # Megatron adds the bias of a row layer on its own, which rounds once more.
    rounding = 1e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(output, expected, rtol=rounding, atol=rounding)
    inputs, upstream = (x, made.weight, made.bias), torch.randn(7, 20, dtype=dtype)
    found, wanted = (torch.autograd.grad(out, inputs, upstream) for out in (output, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


# ---- Transformers ----


def config(**fields: Any) -> Any:
    from tests.megakit.models.networks import NetConfig

    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "init_method_std": 0.5}
    return NetConfig(**{**sizes, "hidden_dropout": 0.0, "attention_dropout": 0.0, **fields})


def block(mask: str = "no_mask", **fields: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megakit.models import transformer_layer_spec

    return TransformerBlock(config(**fields), transformer_layer_spec(AttnMaskType[mask]))


def test_it_computes_as_written_down() -> None:
    """Against torch's own functions, one layer by hand."""
    layer = block(num_layers=1).layers[0]
    weights = dict(layer.named_parameters())
    tokens = torch.randn(5, 3, 8)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, (8,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    qkv = linear(norm(tokens, "input_layernorm"), "self_attention.linear_qkv")
    # Megatron keeps query, key and value of a head together.
    heads = qkv.view(5, 3, 2, 3, 4).permute(3, 1, 2, 0, 4)
    attended = functional.scaled_dot_product_attention(*heads).permute(2, 0, 1, 3).flatten(2)
    x = tokens + linear(attended, "self_attention.linear_proj")
    hidden = functional.gelu(linear(norm(x, "pre_mlp_layernorm"), "mlp.linear_fc1"))
    expected = x + linear(hidden, "mlp.linear_fc2")
    output, _ = layer(tokens, attention_mask=None)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_a_block_is_megatrons_with_the_same_names() -> None:
    """So checkpoints of one are checkpoints of the other, and the outputs are equal."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megakit.models import transformer_block_spec

    fields = {"normalization": "RMSNorm", "layernorm_epsilon": 0.1, "qk_layernorm": True}
    mine = config(**fields, gated_linear_unit=True)
    theirs = get_gpt_decoder_block_spec(mine, False, normalization=mine.normalization)
    expected = TransformerBlock(mine, theirs).eval()
    made = TransformerBlock(mine, transformer_block_spec(mine, AttnMaskType.causal)).eval()
    expected.load_state_dict(made.state_dict())
    tokens = torch.randn(5, 3, 8)
    outputs = [block(tokens, attention_mask=None) for block in (made, expected)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
