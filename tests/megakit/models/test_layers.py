"""Megatron's linear layers and transformers: their first weights, and what they compute."""

import math
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:Apex is not installed"),
]


@pytest.mark.parametrize("kind", ["column", "row"])
def test_first_weights_are_spread_as_in_torch(kind: str) -> None:
    """`nn.Linear` draws weight and bias evenly from within 1 / sqrt(in) of 0."""
    from megakit import models
    from tests.megakit.models.networks import NetConfig

    made = getattr(models, f"{kind}_parallel_linear")(NetConfig(seed=1), 25, 4000, "layer")
    bound = 1 / math.sqrt(25)
    for values in (made.weight, made.bias):
        assert 0.99 * bound < values.max() <= bound
        assert -bound <= values.min() < -0.99 * bound
        assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not torch.equal(made.weight[:, 0], made.bias)


def test_a_block_is_megatrons_with_the_same_names() -> None:
    """So checkpoints of one are checkpoints of the other, and the outputs are equal."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megakit.models import transformer_block_spec
    from tests.megakit.models.networks import NetConfig

    sizes: Any = {"num_layers": 2, "num_attention_heads": 2, "init_method_std": 0.5}
    fields: Any = {"normalization": "RMSNorm", "layernorm_epsilon": 0.1, "qk_layernorm": True}
    mine = NetConfig(**sizes, **fields, gated_linear_unit=True)
    theirs = get_gpt_decoder_block_spec(mine, False, normalization=mine.normalization)
    expected = TransformerBlock(mine, theirs).eval()
    made = TransformerBlock(mine, transformer_block_spec(mine, AttnMaskType.causal)).eval()
    expected.load_state_dict(made.state_dict())
    tokens = torch.randn(5, 3, 8)
    outputs = [block(tokens, attention_mask=None) for block in (made, expected)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


def test_a_layer_is_megatrons_own() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megakit.models import transformer_layer_spec
    from tests.megakit.models.networks import NetConfig

    sizes: Any = {"num_layers": 2, "num_attention_heads": 2, "init_method_std": 0.5}
    mine = NetConfig(**sizes)
    expected = TransformerBlock(mine, get_gpt_layer_local_spec()).eval()
    made = TransformerBlock(mine, transformer_layer_spec(AttnMaskType.causal)).eval()
    expected.load_state_dict(made.state_dict())
    tokens = torch.randn(5, 3, 8)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)[None, None]
    outputs = made(tokens, attention_mask=None), expected(tokens, attention_mask=causal)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
