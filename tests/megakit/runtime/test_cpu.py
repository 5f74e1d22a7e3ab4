"""Megatron's own layers train on a CPU, with all patches in place."""

import pytest


def test_a_tensor_to_cuda(megatron: None) -> None:
    import torch

    tensor = torch.ones(2)
    moved = [tensor.to("cuda", torch.float64), tensor.to(device=0), tensor.cuda()]
    moved += [torch.zeros(2, device="cuda"), torch.empty(2, pin_memory=True).pin_memory()]
    assert [one.device.type for one in moved] == ["cpu"] * 5
    assert moved[0].dtype == torch.float64


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_transformer_block_trains(megatron: None, precision: str) -> None:
    """With dropout and fused functions; recomputing draws the same again."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlock

    dtype = getattr(torch, precision)
    gradients = []
    for recompute in (None, "full"):
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            attention_dropout=0.3,
            hidden_dropout=0.3,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            bias_dropout_fusion=True,
            bias_activation_fusion=True,
            recompute_granularity=recompute,
            recompute_method=recompute and "uniform",
            recompute_num_layers=recompute and 1,
        )
        block = TransformerBlock(config, get_gpt_layer_local_spec())
        torch.manual_seed(1)
        x = torch.randn(5, 2, 16, dtype=dtype, requires_grad=True)
        y = block(x, attention_mask=None)
        y.float().square().sum().backward()
        gradients.append([weight.grad for weight in (x, *block.parameters())])
    assert y.dtype == dtype
    assert not torch.equal(y, block(x, attention_mask=None))  # dropout
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain.isfinite().all()
        assert plain.any()
        assert torch.equal(plain, recomputed)
