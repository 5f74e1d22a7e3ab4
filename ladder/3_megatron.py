"""Step 3: the same training with Megatron-Core alone. `torchrun` starts several processes."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, distributed, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for megakit and mnist

from megakit.job.command_line import parse_options
from megakit.job.option_types import Count, Range
from megakit.models import seeded
from megakit.runtime import use_megatron
from mnist.samples import LadderOptions, TrainingSamples

use_megatron("gpu" if torch.cuda.is_available() else "cpu")  # before the import of Megatron

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module

SEED, LR, WEIGHT_DECAY = 42, 2e-3, 0.01


@dataclass(kw_only=True)
class Options(LadderOptions):
    """Train the tutorial's autoencoder with Megatron-Core, and print the loss of each step."""

    tensor_parallel: Count = 1
    """Number of ranks that share each layer."""
    pipeline_parallel: Annotated[int, Range(least=1, most=2)] = 1
    """Number of pipeline stages. The other ranks are data parallel."""
    micro_batch_size: Count | None = None
    """Samples of one forward pass; by default all samples of a rank in a step."""
    save: Path | None = None
    """Folder for a checkpoint after half of the steps."""
    load: Path | None = None
    """Checkpoint to continue from, of any layout."""


def linear(kind: type, config: TransformerConfig, name: str, inputs: int, outputs: int) -> Any:
    """Builds a sharded layer: each rank draws all weights of `nn.Linear`, and keeps its shard."""
    bound, column = inputs**-0.5, kind is ColumnParallelLinear
    options: Any = {"gather_output": False} if column else {"input_is_parallel": True}
    options |= {"config": config, "bias": True, "skip_bias_add": False}
    with seeded(SEED, name):
        layer = kind(inputs, outputs, init_method=lambda w: w.uniform_(-bound, bound), **options)
        bias = torch.empty(outputs).uniform_(-bound, bound)  # Megatron's bias is 0 at first
    shards = bias.chunk(outputs // len(layer.bias))  # one, if the bias is replicated
    layer.bias.data.copy_(shards[parallel_state.get_tensor_model_parallel_rank() % len(shards)])
    return layer


class Autoencoder(MegatronModule):  # encoder on the first pipeline stage, decoder on the last
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder  # Megatron reads these attributes
        self.share_embeddings_and_output_weights = False
        self.pre_process = parallel_state.is_pipeline_first_stage()
        self.post_process = parallel_state.is_pipeline_last_stage()
        if self.pre_process:
            self.linear1 = linear(ColumnParallelLinear, config, "linear1", 784, 64)
            self.linear2 = linear(RowParallelLinear, config, "linear2", 64, 3)
        if self.post_process:
            self.linear3 = linear(ColumnParallelLinear, config, "linear3", 3, 64)
            self.linear4 = linear(RowParallelLinear, config, "linear4", 64, 784)

    def set_input_tensor(self, input_tensor: list[Tensor]) -> None:
        self.input_tensor = input_tensor[0]  # the output of the previous stage; None on the first

    def forward(self, x: Tensor) -> Tensor:
        if self.pre_process:
            z = self.linear2(self.linear1(x)[0].relu())[0]  # a layer returns (output, bias)
        else:
            z = self.input_tensor.squeeze(0)
        if not self.post_process:
            return z.unsqueeze(0)  # stages exchange (sequence, batch, hidden)
        return self.linear4(self.linear3(z)[0].relu())[0]


def forward_step(batches: Any, model: nn.Module) -> tuple[Tensor, Any]:
    """Computes one micro batch. On the last stage, the schedule calls the returned function."""
    corrupted, images = (part.to(torch.cuda.current_device()) for part in next(batches))

    def loss_function(reconstructions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = nn.functional.mse_loss(reconstructions.float(), images)
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place

    return model(corrupted), loss_function


def start_process_groups(options: Options) -> None:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone: Any = {"init_method": "tcp://localhost:0", "rank": 0, "world_size": 1}
    distributed.init_process_group("nccl", **({} if "RANK" in os.environ else alone))
    parallel_state.initialize_model_parallel(options.tensor_parallel, options.pipeline_parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)  # for layers with dropout


def build(options: Options) -> tuple[Any, Any, Any]:
    """Returns the model with its gradient buffers, the optimizer and the schedule of its rate."""
    is_bf16 = options.precision == "bf16-mixed"
    dtype: Any = {"bf16": is_bf16, "params_dtype": torch.bfloat16 if is_bf16 else torch.float32}
    config = TransformerConfig(
        num_layers=options.pipeline_parallel,  # a multiple of the number of stages
        num_attention_heads=options.tensor_parallel,  # unused, but checked: a multiple of the ranks
        hidden_size=3,  # the width of what stages exchange
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        pipeline_dtype=dtype["params_dtype"],
        use_cpu_initialization=True,  # equal first weights on CPUs and GPUs
        finalize_model_grads_func=finalize_model_grads,  # averages over data-parallel ranks
        **dtype,
    )
    model = Autoencoder(config).to(torch.cuda.current_device())
    model = Float16Module(config, model) if is_bf16 else model
    buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, buffers, model)
    adam = OptimizerConfig(lr=LR, min_lr=0.0, weight_decay=WEIGHT_DECAY, adam_beta2=0.98, **dtype)
    optimizer = get_megatron_optimizer(adam, [model])  # clips to a norm of 1; biases do not decay
    warmup = max(1, round(0.1 * options.steps))
    decay: Any = {"start_wd": WEIGHT_DECAY, "end_wd": WEIGHT_DECAY, "wd_incr_style": "constant"}
    decay |= {"wd_incr_steps": options.steps, "lr_decay_steps": options.steps}
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=LR / (warmup + 1),
        max_lr=LR,
        min_lr=0.0,
        lr_warmup_steps=warmup,
        lr_decay_style="cosine",
        **decay,
    )
    return model, optimizer, scheduler


def state_of(model: Any, optimizer: Any, scheduler: Any, is_loading: bool = False) -> Any:
    """Describes which part of each tensor this rank has, for a checkpoint of any layout."""
    weights = model.module.sharded_state_dict()
    moments = optimizer.sharded_state_dict(weights, is_loading=is_loading)
    return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict()}


def main() -> None:
    options = parse_options(Options)
    start_process_groups(options)
    parts = model, optimizer, scheduler = build(options)
    if options.load:
        state = dist_checkpointing.load(state_of(*parts, is_loading=True), str(options.load))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    batch, size = options.batch_size, options.micro_batch_size or options.batch_size // ranks
    assert batch % (ranks * size) == 0, "ranks times micro batch has to divide the batch size"
    samples = TrainingSamples(options, num_samples=options.steps * batch, seed=SEED)
    for step in range(scheduler.num_steps, options.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        firsts = range(step * batch + rank * size, (step + 1) * batch, ranks * size)
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=(samples[first : first + size] for first in firsts),
            model=[model],
            num_microbatches=len(firsts),
            seq_length=1,
            micro_batch_size=size,
            forward_only=False,
        )
        optimizer.step()
        scheduler.step(increment=1)
        if reports:  # on the last pipeline stage
            loss = sum(report["loss"] for report in reports) / (len(reports) * ranks)
            distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
            if distributed.get_rank() == distributed.get_world_size() - 1:
                print(step + 1, f"{loss:.9f}", flush=True)
        if options.save and step + 1 == options.steps // 2:
            options.save.mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save(state_of(*parts), str(options.save))
    time.sleep(0.1)  # gloo's threads free the last tensors; one that does so while Python ends
    distributed.destroy_process_group()  # would abort the process


if __name__ == "__main__":  # Megatron saves in processes that import this file again
    main()
