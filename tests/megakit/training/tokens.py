"""A model with a loss per token, through Megatron's schedule. Imported once Megatron is set up."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import ModelType
from torch import Tensor, nn

from megakit.training import TokenMeanLossReduction


class TokenLoss(TokenMeanLossReduction):
    """Square of the output for each token."""

    def token_losses(self, batch: Any, forward_out: Tensor) -> Tensor:
        return forward_out.squeeze(-1).square()


class Net(MegatronModule):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.layer = network()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output

    def set_input_tensor(self, input_tensor: Any) -> None:
        pass


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def data() -> tuple[Tensor, Tensor]:
    """32 samples of up to 6 tokens of 5 numbers, and a mask of those that are real."""
    generator = torch.Generator().manual_seed(2)
    lengths = 1 + torch.arange(32) * 6 // 32
    return torch.randn(32, 6, 5, generator=generator), torch.arange(6) < lengths.unsqueeze(1)


def by_megatron(
    num_micro_batches: int, calculate_per_token_loss: bool = True
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of this rank's micro batches, with its data-parallel neighbours'."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        calculate_per_token_loss=calculate_per_token_loss,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), Net(config))
    config.no_sync_func = model.no_sync
    model.zero_grad_buffer()
    parts = num_micro_batches * parallel_state.get_data_parallel_world_size()
    x, mask = (
        t.chunk(parts)[parallel_state.get_data_parallel_rank() :: parts // num_micro_batches]
        for t in data()
    )
    batches = iter([{"x": x, "loss_mask": m} for x, m in zip(x, mask, strict=True)])
    loss = TokenLoss()

    def forward_step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        loss.setup(batch)
        return model(batch["x"]), loss

    reports = forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=model,
        num_microbatches=num_micro_batches,
        seq_length=1,
        micro_batch_size=1,
    )
    named = model.module.layer.named_parameters()
    mean: Any = loss.reduce(reports)
    return float(mean), {name: weight.main_grad for name, weight in named}


def assert_as_of_one_big_batch(loss: float, gradients: dict[str, Tensor]) -> None:
    x, mask = data()
    net = network()
    expected = net(x).squeeze(-1)[mask].square().mean()
    expected.backward()
    assert abs(loss - expected.item()) < 1e-6
    for name, weight in net.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-5, atol=1e-7)
