"""Step 1: a small GPT in plain PyTorch, on one CPU or one GPU."""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for megakit and the text

from ladder.gpt.text_samples import GptOptions, TextSamples
from megakit.job.command_line import parse_options
from megakit.job.option_types import Count
from megakit.models import seeded

SEED, LR = 2, 1e-3
VOCABULARY, LENGTH, LAYERS, HIDDEN, HEADS, FFN = 256, 64, 4, 64, 4, 256


@dataclass(kw_only=True)
class Options(GptOptions):
    """Train a small GPT with PyTorch; print the loss and the gradient's norm of each step."""

    experts: Count | None = None
    """Experts of each layer, of which two see a token; by default, the layers have one MLP."""


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


class Experts(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.router = Linear(HIDDEN, number)
        self.experts = nn.ModuleList(MLP() for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:  # every expert sees every token: slow, and simple
        scores = self.router(x)
        best, chosen = scores.topk(2)
        shares = torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1))
        outputs = [shares[..., [e]] * expert(x) for e, expert in enumerate(self.experts)]
        return torch.stack(outputs).sum(dim=0)


class Layer(nn.Module):
    def __init__(self, experts: int | None) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = Norm(), Norm()
        self.self_attention, self.mlp = Attention(), Experts(experts) if experts else MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class GPT(nn.Module):
    def __init__(self, experts: int | None) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.position_embeddings = nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(Layer(experts) for _ in range(LAYERS))
        self.final_layernorm = Norm()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word_embeddings(tokens) + self.position_embeddings.weight
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.final_layernorm(x), self.word_embeddings.weight)  # tied


options = parse_options(Options)
device = "cuda" if torch.cuda.is_available() else "cpu"
samples = TextSamples(options, LENGTH)
model = GPT(options.experts)
for name, weight in model.named_parameters():
    if weight.dim() > 1:  # the weights of norms stay 1
        with seeded(SEED, name), torch.no_grad():
            weight.normal_(0, 0.06)
model.to(device)
optimizer = torch.optim.Adam(model.parameters(), LR, betas=(0.9, 0.98))
for step in range(options.steps):
    first = step * options.batch_size
    tokens, labels = (part.to(device) for part in samples[first : first + options.batch_size])
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    print(step + 1, f"{loss:.9f}", f"{norm:.9f}", flush=True)
