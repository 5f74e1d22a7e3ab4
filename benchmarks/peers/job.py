"""What all peers train, and how they tell what came of it. Imports neither NeMo nor Megatron."""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

#: Megatron's Adam as `megakit.training.megatron_adam` sets it up.
ADAM: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8}
WEIGHT_DECAY = 0.01
CLIP = 1.0
#: A peer reads the loss of every such step, as the scripts do: on a GPU, to read it is to wait.
LOG_INTERVAL = 10
#: What torch's profiler calls the calls and copies that the benchmarks count.
PROFILED = {
    "kernels": ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemsetAsync"),
    "synchronizations": (
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
    ),
    "copies": ("Memcpy HtoD",),
    "cudaMemcpyAsync": ("cudaMemcpyAsync",),
}


@dataclass(kw_only=True)
class Job:
    """One training of the autoencoder; every peer is asked for the same one."""

    data_dir: Path = Path("data")
    """Folder that holds `MNIST/raw`."""

    device: Literal["cpu", "gpu"] = "cpu"
    """Where all of it computes."""

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

    lr: float = 1e-3
    """Peak learning rate."""

    seed: int = 42
    """Of first weights and order."""

    optimizer: Literal["default", "fused"] = "default"
    """torch's AdamW as it is by default, or its fused kernel; plain torch and Lightning only."""

    every_loss: bool = False
    """Whether every step's loss is read and told, which takes time."""

    profile: bool = False
    """Whether torch's profiler, if it sees the GPU, counts calls after the warm-up."""

    def reads_loss(self, step: int) -> bool:
        """Whether the loss of a step from 0 is read."""
        return self.every_loss or (step + 1) % LOG_INTERVAL == 0

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

        return nn.Sequential(
            self._linear("linear1", 784, 64),
            nn.ReLU(),
            self._linear("linear2", 64, 3),
            self._linear("linear3", 3, 64),
            nn.ReLU(),
            self._linear("linear4", 64, 784),
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

    def flat(self, pixels: Any) -> Any:
        """Input and target (B, 784), computed where the batch is."""
        return pixels.flatten(1).float().div_(255)


class Batches:
    """The bytes of each step's batch, for `Job.flat`; an iterable for any loop.

    For a GPU they are in page-locked memory, and a thread prepares the next ones.

    Args:
        job: Says which data, and how much of it.
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
        firsts = range(0, len(self.samples), self.job.batch_size)
        return map(self._batch, firsts) if self.job.device == "cpu" else self._prefetched(firsts)

    def _batch(self, first: int) -> Any:
        import numpy as np

        return self.samples.get_batch(np.arange(first, first + self.job.batch_size))

    def _prefetched(self, firsts: range) -> Iterator[Any]:
        def pinned(first: int) -> Any:
            return self._batch(first).pin_memory()

        with ThreadPoolExecutor(1) as thread:
            ahead = deque(thread.submit(pinned, first) for first in firsts[:2])
            for first in firsts[2:]:
                yield ahead.popleft().result()
                ahead.append(thread.submit(pinned, first))
            yield from (batch.result() for batch in ahead)


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

    def get_batch(self, indices: Any) -> Any:
        """The pixels, for numpy epochs and indices."""
        import torch

        return torch.from_numpy(self.images.take(self.chosen[indices.idx], axis=0))


@dataclass
class Clock:
    """Notes when each step ended, and what came of it.

    Attributes:
        job: What is timed.
        ends: `time.perf_counter()` at the end of each step.
        losses: Those that were read.
    """

    job: Job
    ends: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._processor: list[float] = []
        self._profiler: Any = None
        # The scripts divert what goes to standard output.
        self._out = os.dup(sys.stdout.fileno())

    def step(self, loss: float | None = None) -> None:
        """One step is over; its loss as a number.

        As a tensor, torch's mean squared error would keep the errors of the whole batch in memory.
        """
        number = len(self.ends) + 1
        if number in (self.job.warm_up, self.job.steps):
            self._wait_for_gpu()
            self._processor.append(time.process_time())
        self.ends.append(time.perf_counter())
        if loss is not None:
            self.losses.append(loss)
        if self.job.profile and number == self.job.warm_up:
            self._profiler = profiler()
            if self._profiler is not None:
                self._profiler.start()
        elif self._profiler is not None and number == self.job.steps:
            self._profiler.stop()

    def _wait_for_gpu(self) -> None:
        """A step on a GPU is over for the host before it is for the GPU."""
        if self.job.device == "gpu" and not self.job.profile:  # which counts synchronizations
            import torch

            torch.cuda.synchronize()

    def tell(self, **more: Any) -> None:
        """Writes what was measured as a line of JSON to the standard output of the start."""
        import torch

        processor = self._processor[-1] - self._processor[0]
        timed = self.ends[self.job.warm_up - 1 :]
        count = len(timed) - 1
        told = {
            "steps_per_second": count / (timed[-1] - timed[0]),
            "processor_ms_per_step": 1000 * processor / count,
            "threads": torch.get_num_threads(),
            "losses": self.losses,
            **more,
        }
        if self._profiler is not None:
            told["profile"] = calls_per_step(self._profiler.key_averages(), count)
        with os.fdopen(self._out, "w") as out:
            print(json.dumps(told), file=out)


def profiler() -> Any:
    """torch's profiler, or None if it sees no GPU."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    seen = supported_activities()  # type: ignore[no-untyped-call]
    return profile(activities=seen, acc_events=True) if ProfilerActivity.CUDA in seen else None


def calls_per_step(
    averages: Any, steps: int, names: dict[str, tuple[str, ...]] = PROFILED
) -> dict[str, float]:
    """How often each kind of call was made; by the beginnings of its names in the profile."""
    return {
        kind: sum(one.count for one in averages if one.key.startswith(beginnings)) / steps
        for kind, beginnings in names.items()
    }


def optimizer_of(job: Job, model: Any) -> Any:
    """torch's AdamW with Megatron's settings: biases do not decay."""
    import torch

    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    how: Any = {"fused": True} if job.optimizer == "fused" else {}
    return torch.optim.AdamW(groups, lr=job.lr, **ADAM, **how)
