"""Step 1: the tutorial's autoencoder in plain PyTorch, on one CPU or one GPU."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for megakit and mnist

from megakit.job.command_line import parse_options
from megakit.models import seeded
from mnist.samples import LadderOptions, TrainingSamples

SEED, LR = 42, 2e-3


def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
    with seeded(SEED, name):  # every step of the ladder starts with the same weights
        return nn.Linear(inputs, outputs)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = linear("linear1", 784, 64), linear("linear2", 64, 3)
        self.linear3, self.linear4 = linear("linear3", 3, 64), linear("linear4", 64, 784)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear2(self.linear1(x).relu())
        return self.linear4(self.linear3(z).relu())


options = parse_options(LadderOptions)
device = "cuda" if torch.cuda.is_available() else "cpu"
samples = TrainingSamples(options, num_samples=options.steps * options.batch_size, seed=SEED)
model = Autoencoder().to(device)
weights, biases = ([p for p in model.parameters() if p.dim() == number] for number in (2, 1))
groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, LR, betas=(0.9, 0.98))
warmup = max(1, round(0.1 * options.steps))
rise = LinearLR(optimizer, 1 / (warmup + 1), 1, warmup)
fall = CosineAnnealingLR(optimizer, options.steps - warmup)
scheduler = SequentialLR(optimizer, [rise, fall], [warmup])

losses = []
for first in range(0, len(samples), size := options.batch_size):
    corrupted, images = (part.to(device) for part in samples[first : first + size])
    with torch.autocast(device, torch.bfloat16, enabled=options.precision == "bf16-mixed"):
        reconstructions = model(corrupted)
    loss = nn.functional.mse_loss(reconstructions.float(), images)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    scheduler.step()
    losses.append(loss.detach())  # printed later, because reading a loss waits for the GPU
for step, loss in enumerate(losses, 1):
    print(step, f"{loss:.9f}")
