"""What all peers train, and how they tell what came of it. Imports neither NeMo nor Megatron."""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

#: Megatron's Adam as `megakit.training.megatron_adam` sets it up.
ADAM: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8}
WEIGHT_DECAY = 0.01
CLIP = 1.0


@dataclass(kw_only=True)
class Job:
    """One training of the autoencoder; every peer is asked for the same one."""

    data_dir: Path = Path("data")
    """Folder that holds `MNIST/raw`."""

    dataset: Literal["mnist", "digits"] = "mnist"
    """The digits ship with scikit-learn."""

    steps: int = 600
    """Optimizer steps."""

    warm_up: int = 100
    """Steps before the clock starts."""

    batch_size: int = 128
    """Samples per step: one micro batch, one global batch."""

    precision: Literal["bf16-mixed", "32"] = "bf16-mixed"
    """As the scripts have it."""

    hidden_size: int = 64
    """Width of the first and the third layer."""

    lr: float = 1e-3
    """Peak learning rate."""

    corruption: float = 0.0
    """Share of pixels dropped."""

    repeats: int = 1
    """How often the training images are repeated; only ours."""

    seed: int = 42
    """Of first weights, order and corruption."""

    optimizer: Literal["fused", "foreach", "for-loop"] = "fused"
    """Which of torch's AdamW; plain torch and plain Lightning only."""

    every_loss: bool = False
    """Whether ours logs, and tells, the loss of every step, which takes time."""

    def lr_factor(self, step: int) -> float:
        """The learning rate at a step from 0, relative to the peak: NeMo's cosine annealing."""
        import math

        warm_up = max(1, round(0.1 * self.steps))
        if step <= warm_up:
            return (step + 1) / (warm_up + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (self.steps - warm_up)))

    def autoencoder(self) -> Any:
        """784-64-3-64-784 with the same first weights as `model_components.PretrainModel`."""
        from torch import nn

        hidden = self.hidden_size
        return nn.Sequential(
            self._linear("linear1", 784, hidden),
            nn.ReLU(),
            self._linear("linear2", hidden, 3),
            self._linear("linear3", 3, hidden),
            nn.ReLU(),
            self._linear("linear4", hidden, 784),
        )

    def _linear(self, name: str, in_features: int, out_features: int) -> Any:
        """As `megakit.models.layers`, which imports Megatron, draws a layer by its name."""
        import hashlib

        import torch

        layer = torch.nn.Linear(in_features, out_features)
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        bound = in_features**-0.5
        for parameter in (layer.weight, layer.bias):
            torch.nn.init.uniform_(parameter, -bound, bound, generator)
        return layer

    def batches(self) -> "Batches":
        """The samples in the order of `model_components.MNISTDataModule`, whole batches at once."""
        return Batches(self)


class Batches:
    """Pairs (input, target) of shape (B, 784), one for each step; an iterable for any loop.

    Args:
        job: Says which data, how much of it, and how the input is corrupted.
    """

    def __init__(self, job: Job) -> None:
        from megakit.data import MultiEpochDatasetResampler

        self.job = job
        self.samples = MultiEpochDatasetResampler(
            Images(job), num_samples=job.steps * job.batch_size, seed=job.seed
        )

    def __len__(self) -> int:
        return self.job.steps

    def __iter__(self) -> Iterator[Any]:
        import numpy as np

        size = self.job.batch_size
        for first in range(0, len(self.samples), size):
            yield self.samples.get_batch(np.arange(first, first + size))


class Images:
    """The training images, indexed by epoch and index, as few operations as can be.

    Args:
        job: Says which.
    """

    def __init__(self, job: Job) -> None:
        import numpy as np
        import torch
        from torch.utils.data import random_split

        from mnist import files as mnist_files

        self.job = job
        if job.dataset == "digits":
            self.images, _ = mnist_files.read_digits("train")
            self.chosen = np.arange(len(self.images))
        else:
            self.images, _ = mnist_files.read_mnist(job.data_dir, train=True)
            numbers: Any = range(len(self.images))
            generator = torch.Generator().manual_seed(42)
            self.chosen = np.array(random_split(numbers, [55_000, 5_000], generator)[0].indices)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError("whole batches only")

    def get_batch(self, index: Any) -> tuple[Any, Any]:
        """The pair for these numpy arrays of epochs and indices."""
        import torch

        from megakit.data import bernoulli

        images = self.images.take(self.chosen[index.idx], axis=0)
        target = torch.from_numpy(images).flatten(1).float().div_(255)
        if not self.job.corruption:
            return target, target
        share = 1 - self.job.corruption
        kept = bernoulli(share, self.job.seed, index.epoch, index.idx, (784,))
        return target * torch.from_numpy(kept).byte(), target


@dataclass
class Clock:
    """Notes when each step ended, and what came of it.

    Attributes:
        job: What is timed.
        ends: `time.perf_counter()` at the end of each step.
        losses: One for each step, or none.
    """

    job: Job
    ends: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._processor: list[float] = []
        # The scripts divert what goes to standard output.
        self._out = os.dup(sys.stdout.fileno())

    def step(self, loss: float | None = None) -> None:
        """One step is over; its loss as a number.

        As a tensor, torch's mean squared error would keep the errors of the whole batch in memory.
        """
        self.ends.append(time.perf_counter())
        if len(self.ends) in (self.job.warm_up, self.job.steps):
            self._processor.append(time.process_time())
        if loss is not None:
            self.losses.append(loss)

    def tell(self, **more: Any) -> None:
        """Writes what was measured as a line of JSON to the standard output of the start."""
        import torch

        processor = self._processor[-1] - self._processor[0]
        timed = self.ends[self.job.warm_up - 1 :]
        count = len(timed) - 1
        # On a machine with other work the quickest stretch says more than the whole.
        stretch = min(50, count)
        quickest = min(b - a for a, b in zip(timed, timed[stretch:], strict=False))
        told = {
            "steps_per_second": count / (timed[-1] - timed[0]),
            "quickest_steps_per_second": stretch / quickest,
            "processor_ms_per_step": 1000 * processor / count,
            "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "threads": torch.get_num_threads(),
            "losses": self.losses,
            **more,
        }
        with os.fdopen(self._out, "w") as out:
            print(json.dumps(told), file=out)


def optimizer_of(job: Job, model: Any) -> Any:
    """torch's AdamW with Megatron's settings: biases do not decay."""
    import torch

    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    how: Any = {"fused": job.optimizer == "fused", "foreach": job.optimizer == "foreach"}
    return torch.optim.AdamW(groups, lr=job.lr, **ADAM, **how)
