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


def test_a_later_stage_s_layer_has_the_same_weights_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes the second layer's weights its own is its number in the whole model."""
    from megakit.models import transformer

    whole = block().layers[1].state_dict()
    alone = block(num_layers=1).layers[0].state_dict()
    assert not torch.equal(alone["mlp.linear_fc1.weight"], whole["mlp.linear_fc1.weight"])
    monkeypatch.setattr(transformer, "get_transformer_layer_offset", lambda *_: 1)
    # Megatron's scaling by depth is for the layers that end a residual branch.
    on_second_stage = block(num_layers=1).layers[0].state_dict()
    for name in ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"):
        assert torch.equal(on_second_stage[name], whole[name])


def test_building_a_layer_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    block()
    assert torch.equal(torch.rand(3), expected)


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


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("is_split", [False, True])
def test_norms_are_marked_for_sequence_parallelism(normalization: str, is_split: bool) -> None:
    from megakit.models.transformer import Norm

    mine = config(normalization=normalization)
    mine.sequence_parallel = is_split
    norm = Norm(mine, 8, eps=0.25)
    assert type(norm) is getattr(torch.nn, normalization)
    assert norm.eps == 0.25
    assert [weight.sequence_parallel for weight in norm.parameters()] == [is_split] * (
        2 if normalization == "LayerNorm" else 1
    )
    assert mine.sequence_parallel is is_split


def test_a_seeded_gpt_model_needs_seeded_layers() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType

    from megakit.errors import UserError
    from megakit.models import SeededGPTModel, transformer_layer_spec

    sizes = {"vocab_size": 8, "max_sequence_length": 4}
    assert SeededGPTModel(config(), transformer_layer_spec(AttnMaskType.causal), **sizes)
    with pytest.raises(UserError, match=r"of TransformerLayer depend.*transformer_block_spec"):
        SeededGPTModel(config(), get_gpt_layer_local_spec(), **sizes)
