"""Step 2: the same training with Lightning, which has the loop and moves tensors to the device."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for megakit and mnist

from megakit.job.command_line import parse_options
from megakit.models import seeded
from mnist.samples import LadderOptions, TrainingSamples

SEED, LR = 42, 2e-3


def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
    with seeded(SEED, name):
        return nn.Linear(inputs, outputs)


class Autoencoder(pl.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.linear1, self.linear2 = linear("linear1", 784, 64), linear("linear2", 64, 3)
        self.linear3, self.linear4 = linear("linear3", 3, 64), linear("linear4", 64, 784)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear2(self.linear1(x).relu())
        return self.linear4(self.linear3(z).relu())

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        corrupted, images = batch
        loss = nn.functional.mse_loss(self(corrupted).float(), images)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        weights, biases = ([p for p in self.parameters() if p.dim() == n] for n in (2, 1))
        groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "weight_decay": 0}]
        optimizer = torch.optim.AdamW(groups, LR, betas=(0.9, 0.98))
        warmup = max(1, round(0.1 * self.steps))
        rise = LinearLR(optimizer, 1 / (warmup + 1), 1, warmup)
        fall = CosineAnnealingLR(optimizer, self.steps - warmup)
        scheduler = SequentialLR(optimizer, [rise, fall], [warmup])
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


options = parse_options(LadderOptions)
samples = TrainingSamples(options, num_samples=options.steps * options.batch_size, seed=SEED)
firsts = range(0, len(samples), options.batch_size)
model = Autoencoder(options.steps)
trainer = pl.Trainer(
    devices=1,
    precision=options.precision,
    max_steps=options.steps,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, (samples[first : first + options.batch_size] for first in firsts))
for step, loss in enumerate(model.losses, 1):
    print(step, f"{loss:.9f}")
