"""Step 3: the same GPT with Megatron-Core alone, under every kind of parallelism."""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for megakit and the text

from ladder.gpt.text_samples import GptOptions, TextSamples
from megakit.job.command_line import parse_options
from megakit.job.option_types import Count
from megakit.models import seeded
from megakit.runtime import use_megatron

use_megatron("gpu" if torch.cuda.is_available() else "cpu")  # before the import of Megatron

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.moe import moe_utils, token_dispatcher

SEED, LR = 2, 1e-3
VOCABULARY, LENGTH, LAYERS, HIDDEN, HEADS, FFN = 256, 64, 4, 64, 4, 256
#: Names weights by layer and by expert; shards Adam's states so that any layout can load them.
METADATA = {
    "non_homogeneous_layers": True,
    "singleton_local_shards": True,
    "distrib_optim_sharding_type": "fully_sharded_model_space",
}


@dataclass(kw_only=True)
class Options(GptOptions):
    """Train a small GPT with Megatron-Core; print the loss and the gradient's norm of each step."""

    tensor_parallel: Count = 1
    """Ranks that share each layer: its heads, its hidden units, and the vocabulary."""
    sequence_parallel: bool = False
    """Whether these ranks also share the tokens between the parallel layers."""
    pipeline_parallel: Count = 1
    """Pipeline stages, which share the layers."""
    chunks: Count = 1
    """Parts of the model on each stage; more than one make an interleaved pipeline."""
    context_parallel: Count = 1
    """Ranks that share the tokens of each sample, in all layers."""
    expert_parallel: Count = 1
    """Ranks that share the experts, among those that read other tokens (data, context)."""
    experts: Count | None = None
    """Experts of each layer, of which two see a token; by default, the layers have one MLP."""
    dispatcher: Literal["allgather", "alltoall"] = "alltoall"
    """How tokens come to their experts: all to every rank, or each to the ranks of its experts."""
    distributed_optimizer: bool = False
    """Whether data-parallel ranks share Adam's states."""
    micro_batch_size: Count = 2
    """Samples of one forward pass."""
    batch_p2p: bool = False
    """Whether stages send and receive in one call; wrong for two interleaved ones (chapter 6)."""
    two_value_loss: bool = False
    """Whether the loss is a mean, not sum and count; wrong with context parallel (chapter 9)."""
    save: Path | None = None
    """Folder for a checkpoint after half of the steps."""
    load: Path | None = None
    """Checkpoint to continue from, of any layout."""


def mend_experts() -> None:
    """Makes Megatron's experts run without Transformer Engine, and without a GPU."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router reads it, and has code for None
    if not torch.cuda.is_available():
        stream: Any = torch.cuda.Stream
        stream.record_event = lambda self, event=None: event or self

        def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
            return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

        token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


class Attention(MegatronModule):
    """Causal attention. Each context-parallel rank has the queries of its tokens, and all keys."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        """Maps queries, keys and values (S, B, heads, width) to (S, B, heads * width)."""
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:  # in the backward pass, it sums the gradients and scatters them
            k, v = (gather_from_sequence_parallel_region(part, group=group) for part in (k, v))
        own = torch.arange(len(q), device=q.device) + group.rank() * len(q)
        visible = own[:, None] >= torch.arange(len(k), device=q.device)
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        context = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return context.permute(2, 0, 1, 3).flatten(2)


class Norm:
    """Builds torch's RMSNorm, because Megatron's refuses sequence parallelism.

    It is a class, because Megatron would not call a function.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> Any:
        norm: Any = nn.RMSNorm(hidden_size, eps)
        # Each rank normalizes different tokens: Megatron sums the gradients of such weights.
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


def start_process_groups(options: Options) -> None:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone: Any = {"init_method": "tcp://localhost:0", "rank": 0, "world_size": 1}
    distributed.init_process_group("nccl", **({} if "RANK" in os.environ else alone))
    parallel_state.initialize_model_parallel(
        options.tensor_parallel,
        options.pipeline_parallel,
        options.chunks if options.chunks > 1 else None,
        context_parallel_size=options.context_parallel,
        expert_model_parallel_size=options.expert_parallel,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)  # for layers with dropout


def config_of(options: Options) -> TransformerConfig:
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=options.tensor_parallel,
        sequence_parallel=options.sequence_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        virtual_pipeline_model_parallel_size=options.chunks if options.chunks > 1 else None,
        pipeline_dtype=torch.float32,
        # With two stages, the previous and the next rank are the same. In one call, an activation
        # and a gradient that are on their way at once would arrive in each other's place.
        batch_p2p_comm=options.batch_p2p,
        context_parallel_size=options.context_parallel,
        expert_model_parallel_size=options.expert_parallel,
        num_moe_experts=options.experts,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=options.dispatcher,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        # The loss function returns sums and counts. With its means, context parallelism would
        # multiply the gradients by its number of ranks.
        calculate_per_token_loss=not options.two_value_loss,
        finalize_model_grads_func=finalize_model_grads,
    )


def build(options: Options) -> tuple[list[Any], Any]:
    """Returns the chunks of the model with their gradient buffers, and the optimizer."""
    config, models = config_of(options), []
    first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
    for number in range(options.chunks):
        chunk = number if options.chunks > 1 else None
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=chunk)
        for layer in block.layer_specs:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
            layer.submodules.self_attention.submodules.core_attention = Attention
        block.layer_norm = Norm
        model = GPTModel(
            config,
            block,
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=first(ignore_virtual=False, vp_stage=chunk),
            post_process=last(ignore_virtual=False, vp_stage=chunk),
            share_embeddings_and_output_weights=True,
            vp_stage=chunk,
        )
        draw_weights(model)
        models.append(model.to(torch.cuda.current_device()))
    shares = options.distributed_optimizer  # both configs have to ask for it
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=shares
    )
    models = [
        DistributedDataParallel(config, buffers, model, disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]
    adam = OptimizerConfig(
        lr=LR,
        min_lr=LR,
        weight_decay=0.0,
        adam_beta2=0.98,
        clip_grad=options.clip,
        params_dtype=torch.float32,
        use_distributed_optimizer=shares,
    )
    return models, get_megatron_optimizer(adam, models)


@torch.no_grad()
def draw_weights(model: Any) -> None:
    """Draws each whole weight by its name, and keeps the part that this rank has."""
    for part in nested_values(model.sharded_state_dict(metadata=METADATA)):
        if isinstance(part, ShardedTensor) and len(part.global_shape) > 1:
            name = part.key.partition(".")[2].replace("experts.experts", "experts")
            with seeded(SEED, name):  # by the name in 1_torch.py
                whole = torch.empty(part.global_shape).normal_(0, 0.06)
            part.data.copy_(whole[part.global_slice()].view_as(part.data))


def micro_batches(samples: TextSamples, firsts: range, size: int) -> Iterator[list[Tensor]]:
    """Yields this rank's micro batches: tokens and labels; of a sequence, this rank's part."""
    group = parallel_state.get_context_parallel_group()
    own = slice(group.rank() * LENGTH // group.size(), (group.rank() + 1) * LENGTH // group.size())
    positions = torch.arange(LENGTH).expand(size, -1)
    for first in firsts:
        parts = (*samples[first : first + size], positions)
        yield [part[:, own].to(torch.cuda.current_device()) for part in parts]


def forward_step(batches: Any, model: Any) -> tuple[Tensor, Any]:
    """Computes one micro batch. On the last stage, the schedule calls the returned function."""
    tokens, labels, positions = next(batches)

    def loss_function(losses: Tensor) -> tuple[Tensor, ...]:
        total, count = losses.sum(), torch.tensor(losses.numel(), device=losses.device).int()
        report = torch.stack([total.detach(), count.float()])
        if model.config.calculate_per_token_loss:
            return total, count, report
        return total / count, report

    return model(tokens, positions, None, labels=labels), loss_function


def state_of(
    models: list[Any], optimizer: Any, step: int = 0, is_loading: bool = False
) -> dict[str, Any]:
    """Describes which part of each tensor this rank has, for a checkpoint of any layout."""
    parts = [model.module.sharded_state_dict(metadata=METADATA) for model in models]
    weights = {f"model{number}": part for number, part in enumerate(parts)}
    moments = optimizer.sharded_state_dict(
        weights if len(models) > 1 else parts[0], is_loading=is_loading, metadata=METADATA
    )
    return {**weights, "optimizer": moments, "step": step}


def main() -> None:
    options = parse_options(Options)
    start_process_groups(options)
    mend_experts()
    models, optimizer = build(options)
    begin = 0
    if options.load:
        state = dist_checkpointing.load(
            state_of(models, optimizer, is_loading=True), str(options.load)
        )
        for number, model in enumerate(models):
            model.module.load_state_dict(state[f"model{number}"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    batch, size = options.batch_size, options.micro_batch_size
    assert batch % (ranks * size) == 0, "ranks times micro batch has to divide the batch size"
    parts = options.context_parallel * options.tensor_parallel
    assert LENGTH % parts == 0, f"tensor x context parallel has to divide {LENGTH} tokens"
    samples = TextSamples(options, LENGTH)
    for step in range(begin, options.steps):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        firsts = range(step * batch + rank * size, (step + 1) * batch, ranks * size)
        batches = [micro_batches(samples, firsts, size) for _ in models]  # each chunk reads them
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches if len(models) > 1 else batches[0],
            model=models,
            num_microbatches=len(firsts),
            seq_length=LENGTH,
            micro_batch_size=size,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        if reports:  # on the last pipeline stage
            total = sum(reports)
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            distributed.all_reduce(total, group=group)
            if distributed.get_rank() == distributed.get_world_size() - 1:
                print(step + 1, f"{total[0] / total[1]:.9f}", f"{norm:.9f}", flush=True)
        if options.save and step + 1 == options.steps // 2:
            options.save.mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save(state_of(models, optimizer, step + 1), str(options.save))
    time.sleep(0.1)  # gloo's threads free the last tensors; one that does so while Python ends
    distributed.destroy_process_group()  # would abort the process


if __name__ == "__main__":  # Megatron saves in processes that import this file again
    main()
