"""Step 2: the same GPT with PyTorch's FSDP2. `torchrun` starts several processes."""

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for megakit and the text

from ladder.gpt.text_samples import GptOptions, TextSamples
from megakit.job.command_line import parse_options
from megakit.models import seeded

SEED, LR = 2, 1e-3
VOCABULARY, LENGTH, LAYERS, HIDDEN, HEADS, FFN = 256, 64, 4, 64, 4, 256


Linear = functools.partial(nn.Linear, bias=False)
Norm = functools.partial(nn.RMSNorm, HIDDEN, eps=1e-5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv, self.linear_proj = Linear(HIDDEN, 3 * HIDDEN), Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:  # Megatron's order of the rows: head, (q, k, v), width
        qkv = self.linear_qkv(x).unflatten(-1, (HEADS, 3, HIDDEN // HEADS))
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.linear_proj(context.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = Linear(HIDDEN, FFN), Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear_fc2(functional.gelu(self.linear_fc1(x)))
        return output


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = Norm(), Norm()
        self.self_attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.position_embeddings = nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.final_layernorm = Norm()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word_embeddings(tokens) + self.position_embeddings.weight
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.final_layernorm(x), self.word_embeddings.weight)  # tied


def main() -> None:
    options = parse_options(GptOptions)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    kind, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone: Any = {"init_method": "tcp://localhost:0", "rank": 0, "world_size": 1}
    distributed.init_process_group(backend, **({} if "RANK" in os.environ else alone))
    mesh = init_device_mesh(kind, (ranks,))
    model = GPT()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:  # the weights of norms stay 1
            with seeded(SEED, name), torch.no_grad():
                weight.normal_(0, 0.06)
    model.to(kind)
    for layer in model.layers:  # gathered before its forward pass, and before its backward pass
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), LR, betas=(0.9, 0.98))
    samples = TextSamples(options, LENGTH)
    assert options.batch_size % ranks == 0, "the number of ranks has to divide the batch size"
    size = options.batch_size // ranks
    for step in range(options.steps):
        first = step * options.batch_size + rank * size
        tokens, labels = (part.to(kind) for part in samples[first : first + size])
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()  # FSDP averages the gradients over the ranks
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        total, norm = loss.detach().clone(), norm.full_tensor()
        distributed.all_reduce(total)
        if rank == ranks - 1:
            print(step + 1, f"{total / ranks:.9f}", f"{norm:.9f}", flush=True)
    time.sleep(0.1)  # gloo's threads free the last tensors; one that does so while Python ends
    distributed.destroy_process_group()  # would abort the process


if __name__ == "__main__":
    main()
