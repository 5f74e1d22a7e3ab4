"""Trains the ladder's autoencoder on several ranks with torch.distributed alone.

It does by hand what Megatron does in ladder/3_megatron.py: sharded layers, the norm of a gradient
whose parts are on several ranks, and an Adam whose state is divided over the data-parallel ranks.
"""

import math
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parameters_to_vector, vector_to_parameters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for megakit and mnist

from megakit.job.command_line import parse_options
from megakit.job.option_types import Count, Range
from megakit.models import seeded
from mnist.samples import LadderOptions, TrainingSamples

SEED, LR, WEIGHT_DECAY = 42, 2e-3, 0.01
BETAS, EPSILON = (0.9, 0.98), 1e-8


@dataclass(kw_only=True)
class Options(LadderOptions):
    """Train the tutorial's autoencoder; print the loss and the gradient's norm of each step."""

    tensor_parallel: Count = 1
    """Number of ranks that share each layer. The other ranks are data parallel."""

    clip: Annotated[float, Range(above=0)] = 1.0
    """The largest norm of the gradient; a larger gradient is scaled to it."""


def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
    with seeded(SEED, name):  # as in 1_torch.py: the whole layer, equal on all ranks
        return nn.Linear(inputs, outputs)


class CopyToRanks(torch.autograd.Function):
    """Hands a layer's whole input to all of its ranks, each of which computes a part with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOverRanks(torch.autograd.Function):
    """Adds up the summands that a layer's ranks have computed."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: Any) -> Tensor:
        total = summand.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes a part of the outputs.

    Its weight (outputs, inputs) and its bias (outputs) are sharded along the outputs.
    """

    def __init__(self, name: str, inputs: int, outputs: int, group: Any) -> None:
        super().__init__()
        self.group, whole = group, linear(name, inputs, outputs)
        self.weight = nn.Parameter(whole.weight.chunk(group.size())[group.rank()])
        self.bias = nn.Parameter(whole.bias.chunk(group.size())[group.rank()])

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(CopyToRanks.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank has a part of the inputs.

    Its weight (outputs, inputs) is sharded along the inputs. The bias (outputs) is replicated.
    """

    def __init__(self, name: str, inputs: int, outputs: int, group: Any) -> None:
        super().__init__()
        self.group, whole = group, linear(name, inputs, outputs)
        shard = whole.weight.chunk(group.size(), dim=1)[group.rank()]
        self.weight = nn.Parameter(shard.contiguous())
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        summand = nn.functional.linear(x, self.weight)
        output: Tensor = SumOverRanks.apply(summand, self.group) + self.bias
        return output


class Autoencoder(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.linear1 = ColumnParallelLinear("linear1", 784, 64, group)
        self.linear2 = RowParallelLinear("linear2", 64, 3, group)
        self.linear3 = ColumnParallelLinear("linear3", 3, 64, group)
        self.linear4 = RowParallelLinear("linear4", 64, 784, group)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear2(self.linear1(x).relu())
        return self.linear4(self.linear3(z).relu())


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


def average_gradients(model: nn.Module, group: Any) -> None:
    for gradient in gradients_of(model).values():
        distributed.all_reduce(gradient, group=group)
        gradient /= group.size()


def gradient_norm(model: nn.Module, group: Any) -> Tensor:
    """Returns the norm of the whole model's gradient, the same number on every rank."""
    sharded, replicated = next(model.parameters()).new_zeros(2)
    for name, gradient in gradients_of(model).items():
        if name in ("linear2.bias", "linear4.bias"):
            replicated += gradient.square().sum()
        else:
            sharded += gradient.square().sum()
    distributed.all_reduce(sharded, group=group)
    return (sharded + replicated).sqrt()


class ShardedAdam:
    """AdamW, of whose moments each data-parallel rank stores and updates its own part.

    Attributes:
        own: The part of this rank in the vector of all weights, which is padded to equal parts.
        moments: Adam's two moments of this part, float32 (2, part).
        decay: The weight decay of each number in this part, float32 (part). Biases have none.
        steps: Number of steps so far.
    """

    def __init__(self, model: nn.Module, group: Any) -> None:
        self.model, self.group, self.steps = model, group, 0
        size = math.ceil(sum(weight.numel() for weight in model.parameters()) / group.size())
        self.own = slice(group.rank() * size, (group.rank() + 1) * size)
        decays = [torch.full_like(w, WEIGHT_DECAY * (w.dim() > 1)) for w in model.parameters()]
        self.decay = self.padded(decays)[self.own]
        self.moments = torch.zeros_like(self.decay.expand(2, -1))

    def padded(self, tensors: Iterable[Tensor]) -> Tensor:
        """Returns the numbers of tensors as one vector, and zeros up to equal parts."""
        vector = parameters_to_vector(tensors).detach()
        return nn.functional.pad(vector, (0, -len(vector) % self.group.size()))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.steps += 1
        gradient = self.padded(gradients_of(self.model).values())[self.own]
        part = self.padded(self.model.parameters())[self.own] * (1 - lr * self.decay)
        mean, square = self.moments
        mean.lerp_(gradient, 1 - BETAS[0])
        square.lerp_(gradient.square(), 1 - BETAS[1])
        root = (square / (1 - BETAS[1] ** self.steps)).sqrt() + EPSILON
        part -= lr * mean / (1 - BETAS[0] ** self.steps) / root
        whole = torch.empty_like(part.repeat(self.group.size()))
        distributed.all_gather_into_tensor(whole, part, group=self.group)
        vector_to_parameters(whole, self.model.parameters())  # it leaves the padding out


def rate(step: int, steps: int) -> float:
    """Returns the learning rate of a step: a linear rise, and a cosine to 0."""
    warmup = max(1, round(0.1 * steps))
    if step < warmup:
        return LR * (step + 1) / (warmup + 1)
    return LR * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def main() -> None:
    options = parse_options(Options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = options.tensor_parallel  # the ranks of a layer are neighbours, as in Megatron
    data = int(os.environ["WORLD_SIZE"]) // tensor
    mesh = init_device_mesh(device, (data, tensor), mesh_dim_names=("data", "tensor"))
    data_ranks, tensor_ranks = mesh.get_group("data"), mesh.get_group("tensor")
    model = Autoencoder(tensor_ranks).to(device)
    optimizer = ShardedAdam(model, data_ranks)
    batch, size = options.batch_size, options.batch_size // data_ranks.size()
    samples = TrainingSamples(options, num_samples=options.steps * batch, seed=SEED)
    for step in range(options.steps):
        first = step * batch + data_ranks.rank() * size
        corrupted, images = (part.to(device) for part in samples[first : first + size])
        loss = nn.functional.mse_loss(model(corrupted), images)
        model.zero_grad()
        loss.backward()
        average_gradients(model, data_ranks)
        norm = gradient_norm(model, tensor_ranks)
        for gradient in gradients_of(model).values():
            gradient *= min(1.0, options.clip / float(norm))
        optimizer.step(rate(step, options.steps))
        distributed.all_reduce(loss, group=data_ranks)
        if distributed.get_rank() == 0:
            print(step + 1, f"{loss / data_ranks.size():.9f}", f"{float(norm):.9f}", flush=True)
    time.sleep(0.1)  # gloo's threads free the last tensors; one that does so while Python ends
    distributed.destroy_process_group()  # would abort the process


if __name__ == "__main__":
    main()
