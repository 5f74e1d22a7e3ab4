"""Step 3 of the ladder with more of Megatron, and with faults that users of it make."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

ladder: Any = import_module("ladder.gpt.3_megatron")

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    mappings,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import MLATransformerConfig, ModuleSpec
from megatron.core.transformer.dot_product_attention import DotProductAttention


@dataclass(kw_only=True)
class Options(ladder.Options):
    """Train a small GPT that may have a fault."""

    config: str = "{}"
    """Changes of Megatron's configuration, and of the arguments of its GPTModel."""
    masked: bool = False
    """Whether the loss leaves out some tokens."""
    padding: bool = False
    """Whether the router leaves them out, too."""
    fault: Literal["none", "smoothing", "gathered", "partial", "transposed", "delta"] = "none"
    """What is wrong."""


def places(length: int) -> Tensor:
    """The tokens of each context-parallel rank as Megatron shares them: one from each end."""
    parts, size = torch.arange(length), parallel_state.get_context_parallel_world_size()
    chunks = parts.chunk(2 * size)
    return torch.stack([torch.cat([chunks[n], chunks[-1 - n]]) for n in range(size)])


def own_part(tensor: Tensor, dim: int) -> Tensor:
    own = places(tensor.shape[dim])[parallel_state.get_context_parallel_rank()]
    return tensor.index_select(dim, own.to(tensor.device))


class Attention(ladder.Attention):
    """That of the ladder for these parts of a sample, with a weight that all heads may share."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config)
        if config.fault == "partial":  # each rank multiplies its own heads with it
            self.scale = nn.Parameter(torch.ones(config.kv_channels))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            k, v = (gather_from_sequence_parallel_region(part, group=group) for part in (k, v))
        all_places = places(len(k)).to(q.device)
        visible = all_places[group.rank()][:, None] >= all_places.flatten()
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q * getattr(self, "scale", 1), k, v))
        context = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return context.permute(2, 0, 1, 3).flatten(2)


def logits_of(hidden: Tensor, weight: Tensor, **_: Any) -> tuple[Tensor, None]:
    """The last layer, whose backward pass sums a gradient that is not contiguous."""
    hidden = copy_to_tensor_model_parallel_region(hidden).transpose(0, 1).contiguous()
    return (hidden @ weight.T).transpose(0, 1).contiguous(), None


def gated_delta_net() -> ModuleSpec:
    """A later Megatron's layer in place of attention, in torch without its kernels."""
    package = import_module("megatron.core.ssm.gated_delta_net")
    package.common.HAVE_FLA, package.common.l2norm = True, partial(nn.functional.normalize, dim=-1)
    parts = ColumnParallelLinear, ladder.Norm, RowParallelLinear
    spec = package.GatedDeltaNetSubmodules(*parts)
    return ModuleSpec(package.GatedDeltaNet, submodules=spec)


class Model(ladder.GPTModel):
    """Megatron's, with multi-token prediction if the configuration asks for it."""

    def __init__(self, config: Any, block: Any, *, vp_stage: Any, **options: Any) -> None:
        for layer in block.layer_specs if config.fault == "delta" else ():
            layer.submodules.self_attention = gated_delta_net()
        for layer in block.layer_specs if config.qk_layernorm else ():
            parts = layer.submodules.self_attention.submodules
            parts.q_layernorm = parts.k_layernorm = parts.kv_layernorm = ladder.Norm
        use_mtp = config.mtp_num_layers is not None
        mtp = get_gpt_mtp_block_spec(config, block, False, vp_stage) if use_mtp else None
        for layer in mtp.layer_specs if mtp else ():
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = ladder.Norm
        options |= {"mtp_block_spec": mtp, "parallel_output": config.fault != "gathered"}
        super().__init__(config, block, vp_stage=vp_stage, **(options | config.arguments))
        for name, weight in self.named_parameters():
            if name.endswith("softmax_offset"):  # Megatron leaves what was in the memory
                torch.nn.init.zeros_(weight)
        if config.fault == "transposed" and self.post_process:
            self.output_layer.forward = logits_of
            mappings._reduce = getattr(mappings._reduce, "__wrapped__", mappings._reduce)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        if self.config.fault != "smoothing":
            return super().compute_language_model_loss(labels, logits.clone())
        return vocab_parallel_cross_entropy(logits.float(), labels.T.contiguous(), 0.1).T


def config_of(original: Any, options: Options) -> Any:
    changes = json.loads(options.config)
    if "kv_lora_rank" in changes:
        ladder.TransformerConfig = MLATransformerConfig
    config = original(options)
    for name in [one for one in changes if hasattr(config, one)]:
        setattr(config, name, changes.pop(name))
    config.fault, config.arguments = options.fault, changes
    ladder.Attention = DotProductAttention if config.softmax_type == "learnable" else Attention
    ladder.forward_step = partial(forward_step, options)
    return config


def micro_batches(samples: Any, firsts: range, size: int) -> Iterator[list[Tensor]]:
    """Yields this rank's micro batches."""
    positions = torch.arange(ladder.LENGTH).expand(size, -1)
    for first in firsts:
        parts = (*samples[first : first + size], positions)
        yield [own_part(part, 1).to(torch.cuda.current_device()) for part in parts]


def forward_step(options: Options, batches: Any, model: Any) -> tuple[Tensor, Any]:
    """Computes one micro batch."""
    tokens, labels, positions = next(batches)
    mask = tokens % 3 > 0 if options.masked else torch.ones_like(tokens).bool()
    more = {"padding_mask": ~mask} if options.padding else {}

    def loss_function(losses: Tensor) -> tuple[Tensor, ...]:
        total, count = (losses * mask).sum(), mask.sum().int()
        return total, count, torch.stack([total.detach(), count.float()])

    losses = model(tokens, positions, None, labels=labels, loss_mask=mask.float(), **more)
    return losses, loss_function


ladder.Options, ladder.GPTModel, ladder.micro_batches = Options, Model, micro_batches
ladder.config_of = partial(config_of, ladder.config_of)
if __name__ == "__main__":
    ladder.main()
