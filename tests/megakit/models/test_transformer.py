"""Megatron's transformer layer: what it starts from, and what its tokens see."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


def block(mask: str = "no_mask", seed: int = 1, **sizes: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megakit.models import transformer_layer_spec
    from tests.megakit.models.networks import NetConfig

    config = NetConfig(
        seed=seed,
        **{"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, **sizes},
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.5,
    )
    return TransformerBlock(config, transformer_layer_spec(AttnMaskType[mask]))


def test_first_weights_belong_to_seed_and_layer() -> None:
    first, other_seed = dict(block().named_parameters()), dict(block(seed=2).named_parameters())
    torch.manual_seed(123)
    again = dict(block().named_parameters())
    name = "layers.{}.mlp.linear_fc1.weight"
    assert all(torch.equal(again[key], weight) for key, weight in first.items())
    assert not torch.equal(first[name.format(0)], first[name.format(1)])
    assert not torch.equal(first[name.format(0)], other_seed[name.format(0)])


def test_a_layer_on_its_own_is_the_first() -> None:
    from megatron.core.transformer.spec_utils import build_module

    from megakit.models import transformer_layer_spec

    whole = block()
    alone = dict(build_module(transformer_layer_spec(), config=whole.config).named_parameters())
    first = dict(whole.layers[0].named_parameters())
    assert alone.keys() == first.keys()
    assert all(torch.equal(alone[name], weight) for name, weight in first.items())


@pytest.mark.parametrize(("mask", "seen"), [("no_mask", [0, 1, 2, 3]), ("causal", [0, 1])])
def test_what_a_token_sees(mask: str, seen: list[int]) -> None:
    tokens = torch.randn(4, 1, 8, requires_grad=True)
    output = block(mask)(tokens, attention_mask=None)
    # Not a token's sum: after the last layer norm that is 0, whatever there was.
    (gradient,) = torch.autograd.grad(output[1, 0, 0], tokens)
    assert gradient.abs().sum(dim=(1, 2)).nonzero().flatten().tolist() == seen


def test_it_computes_as_written_down() -> None:
    """Against torch's own functions, one layer by hand."""
    layer = block(num_layers=1).layers[0]
    weights = dict(layer.named_parameters())
    tokens = torch.randn(5, 3, 8)
    functional = torch.nn.functional

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


# --- The whole block, and language models ---------------------------------------------------------


def config(**fields: Any) -> Any:
    from tests.megakit.models.networks import NetConfig

    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    return NetConfig(**{**sizes, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"normalization": "RMSNorm", "layernorm_epsilon": 0.1},
        {"qk_layernorm": True, "gated_linear_unit": True},
    ],
    ids=str,
)
def test_a_block_is_megatrons_with_the_same_names(fields: dict[str, Any]) -> None:
    """So checkpoints of one are checkpoints of the other, and the outputs are equal."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megakit.models import transformer_block_spec

    mine = config(**fields)
    theirs = get_gpt_decoder_block_spec(mine, False, normalization=mine.normalization)
    expected = TransformerBlock(mine, theirs).eval()
    made = TransformerBlock(mine, transformer_block_spec(mine, AttnMaskType.causal)).eval()
    expected.load_state_dict(made.state_dict())
    tokens = torch.randn(5, 3, 8)
    outputs = [block(tokens, attention_mask=None) for block in (made, expected)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
