"""Trains with one program, in this process, and prints its figures as a line of JSON.

    python benchmarks/peer.py {ours,alone,1_torch,fused,2_lightning,3_megatron,4_nemo} [...]

`ours` is model_pretrain.py, and `alone` that of examples/megatron; `alone_short` runs its micro
batches by megakit's shorter schedule. The others are the files of ladder/, which run unchanged,
timed at the end of each optimizer step. `1_torch_by_hand`, `fused_by_hand` and
`2_lightning_by_hand` read from one tensor with all images. On a GPU, `ours_graph` and `fused_graph`
compute in CUDA graphs. The
step is compared, so pixels are not corrupted unless `--corruption` says so, and nothing is
validated or saved while the clock runs.
"""

import contextlib
import functools
import io
import json
import os
import re
import runpy
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import REPOSITORY
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, supported_activities

from megakit.job import Run, run_script
from megakit.job.command_line import parse_options
from mnist import samples
from mnist.samples import LadderOptions, TrainingSamples

OURS = ("ours", "ours_graph", "alone", "alone_short")
FILES = {file.stem: file for file in sorted((REPOSITORY / "ladder").glob("[1-9]_*.py"))}
FILES |= dict.fromkeys(("fused", "fused_graph"), FILES["1_torch"])  # with torch's fused AdamW
FILES |= {f"{name}_by_hand": FILES[name] for name in ("1_torch", "fused", "2_lightning")}
#: The beginnings of the names that torch's profiler gives to what the benchmark counts, and the
#: categories of what a GPU does. An annotation, such as the optimizer's, would count kernels again.
PROFILED = {
    "kernels": ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemsetAsync"),
    "graphs": ("cudaGraphLaunch",),
    "synchronizations": tuple(f"cuda{what}Synchronize" for what in ("Stream", "Device", "Event")),
    "copies": ("Memcpy HtoD",),
    "cudaMemcpyAsync": ("cudaMemcpyAsync",),
}
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


@dataclass(kw_only=True)
class Job(LadderOptions):
    """Train the tutorial's autoencoder, and print a line of JSON."""

    warm_up: int = 100
    """Steps before the clock starts."""

    corruption: float = 0.0
    """Share of pixels that are set to 0; model_pretrain.py alone."""

    profile: bool = False
    """Count calls and copies after the warm-up, if torch's profiler sees a GPU."""

    waits: bool = False
    """Print `ready` before the training, and wait for a line."""


class Clock:
    """Notes the time at the end of the warm-up and of the last step; profiles between them."""

    def __init__(self, job: Job) -> None:
        self.job, self.steps = job, 0
        self.marks: list[tuple[float, float]] = []
        self.profiler: Any = None
        seen: Any = supported_activities() if job.profile else ()  # type: ignore[no-untyped-call]
        if ProfilerActivity.CUDA in seen:
            self.profiler = profile(activities=seen)
        self.out = os.dup(sys.stdout.fileno())  # model_pretrain.py diverts standard output

    def wait(self) -> None:
        """Says that the imports are done; the start of another training shall not disturb ours."""
        if self.job.waits:
            os.write(self.out, b"ready\n")
            if not sys.stdin.readline():
                sys.exit("Nobody waits for this training any more.")

    def step(self, *_: Any) -> None:
        """Counts a step; torch calls this as a hook of optimizers."""
        self.steps += 1
        if self.steps not in (self.job.warm_up, self.job.steps):
            return
        if torch.cuda.is_available() and not self.job.profile:  # a profile would count this wait
            torch.cuda.synchronize()  # the GPU is behind
        self.marks.append((time.perf_counter(), time.process_time()))
        if self.profiler is not None:
            (self.profiler.start if self.steps < self.job.steps else self.profiler.stop)()

    def tell(self, losses: dict[int, float]) -> None:
        """Prints what was measured, and the losses by step."""
        if self.steps != self.job.steps:
            raise RuntimeError(f"{self.steps} steps of the optimizer, not {self.job.steps}")
        (began, processor_began), (ended, processor_ended) = self.marks
        count = self.job.steps - self.job.warm_up
        told: dict[str, Any] = {
            "steps_per_second": count / (ended - began),
            "processor_ms_per_step": 1000 * (processor_ended - processor_began) / count,
            "losses": losses,
        }
        if self.profiler is not None:
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                self.profiler.export_chrome_trace(file.name)
                events = json.loads(Path(file.name).read_text())["traceEvents"]
            told["profile"] = {kind: value / count for kind, value in totals(events).items()}
        with os.fdopen(self.out, "w") as out:
            print(json.dumps(told), file=out)


def totals(events: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the number of calls and copies by kind, the time of the GPU, and the bytes copied."""
    found: dict[str, float] = {
        kind: sum(event["name"].startswith(names) for event in events)
        for kind, names in PROFILED.items()
    }
    copies = (event for event in events if event["name"].startswith(PROFILED["copies"]))
    found["bytes copied"] = sum(copy["args"]["bytes"] for copy in copies)
    found["GPU ms"] = sum(event["dur"] for event in events if event.get("cat") in ON_GPU) / 1000
    return found


class InMemory(TrainingSamples):
    """As one writes it by hand: all images, and their order, as tensors on the device."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        dataset: Any = self.resampled.dataset
        dataset.get_batch = lambda index: torch.from_numpy(index.idx)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.images = torch.tensor(dataset.images).to(device)
        self.order = self.resampled.get_batch(np.arange(len(self))).to(device)

    def __getitem__(self, some: slice) -> tuple[Tensor, Tensor]:
        images = self.images[self.order[some]].float().flatten(1) / 255
        return images, images


class Prefetched(TrainingSamples):
    """Batches on the GPU: a thread prepares the next two as bytes in page-locked memory."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        dataset: Any = self.resampled.dataset
        dataset.get_batch = lambda index: torch.from_numpy(dataset.images[index.idx]).pin_memory()
        self.thread = ThreadPoolExecutor(1)
        self.batches: dict[int, Future[Any]] = {}

    def __getitem__(self, some: slice) -> tuple[Tensor, Tensor]:
        size = some.stop - some.start
        for first in range(some.start, min(some.start + 3 * size, len(self)), size):
            if first not in self.batches:
                batch = slice(first, first + size)
                self.batches[first] = self.thread.submit(super().__getitem__, batch)
        pixels: Any = self.batches.pop(some.start).result()
        images = pixels.to("cuda", non_blocking=True).flatten(1).float().div_(255)
        return images, images


def train_on_ladder(name: str, job: Job, clock: Clock) -> None:
    """Runs a file of the ladder as it is, with other samples and without saves."""
    register_optimizer_step_post_hook(clock.step)
    kind = Prefetched if torch.cuda.is_available() else TrainingSamples
    if name.endswith("_by_hand"):
        kind = InMemory
    if name == "4_nemo":
        from lightning.pytorch.callbacks import ModelCheckpoint

        kind = TrainingSamples  # it reads sample by sample
        for method in ("on_train_batch_end", "_save_last_checkpoint"):
            setattr(ModelCheckpoint, method, lambda *_: None)

    def open_samples(options: LadderOptions, num_samples: int, seed: int) -> TrainingSamples:
        opened = kind(options, num_samples, seed, corruption=0.0)
        clock.wait()
        return opened

    changed: Any = samples
    changed.TrainingSamples = open_samples
    if name.startswith("fused"):
        changed = torch.optim
        changed.AdamW = functools.partial(changed.AdamW, fused=True)
    if name == "fused_graph" and torch.cuda.is_available():
        changed = torch.nn.Module
        changed.to = functools.partialmethod(graphed, job, changed.to)
    given = ("steps", "batch_size", "precision", "dataset", "data_dir")
    set_options({option.replace("_", "-"): getattr(job, option) for option in given})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(FILES[name]), run_name="__main__")
    lines = re.findall(r"^(\d+) (\d\S+)$", printed.getvalue(), re.MULTILINE)
    clock.tell({int(step): float(loss) for step, loss in lines})


def graphed(module: Any, job: Job, to: Any, device: str) -> Any:
    """Moves the model to the GPU, and captures its forward and its backward pass in CUDA graphs."""
    sample = torch.zeros(job.batch_size, 784, device=device)
    is_mixed = job.precision == "bf16-mixed"
    # A weight that is cached in bfloat16 would not follow the optimizer.
    with torch.autocast(device, torch.bfloat16, enabled=is_mixed, cache_enabled=False):
        return torch.cuda.make_graphed_callables(to(module, device), (sample,))


def train_ours(name: str, job: Job, clock: Clock) -> None:
    """Runs model_pretrain.py, which validates and saves after the last step; does not return."""
    is_alone = name.startswith("alone")
    script: Any = import_module(f"{'examples.megatron.' * is_alone}model_pretrain")
    set_options(
        {
            "data-dir": job.data_dir,
            "dataset": job.dataset,
            "output-dir": tempfile.mkdtemp(),
            "max-steps": job.steps,
            "global-batch-size": job.batch_size,
            "micro-batch-size": job.batch_size,
            "precision": job.precision,
            "corruption": job.corruption,
            "val-interval": job.steps,
            "save-interval": job.steps,
        }
    )
    work = functools.partial(timed, script=script, name=name, clock=clock)
    run_script(script.PRETRAIN, script.PretrainOptions, work, uses_nemo=not is_alone)


def timed(run: Run, script: Any, name: str, clock: Clock) -> Path:
    """Does the work of a model_pretrain.py, whose optimizer calls no hooks of torch."""
    from megakit.training.metrics_csv import read_metrics

    if name.startswith("alone"):
        loop: Any = import_module("examples.megatron.training_loop")
        place, method = loop.Training, "train_step"
        if name == "alone_short":
            use_short_schedule(loop)
    else:
        if name == "ours_graph":
            use_graph(import_module("model_trainer"))
        place, method = import_module("megakit.nemo.reporter").Reporter, "on_train_batch_end"
    original = getattr(place, method)

    def at_the_end_of_a_step(*args: Any) -> Any:
        result = original(*args)
        clock.step()
        return result

    setattr(place, method, at_the_end_of_a_step)
    clock.wait()
    checkpoint: Path = script.pretrain(run)
    rows = read_metrics(run.path / "metrics.csv")
    clock.tell({row.step: row.train_loss for row in rows if row.train_loss is not None})
    return checkpoint


def use_short_schedule(loop: Any) -> None:
    """Lets the loop of examples/megatron train by the schedule of model_pretrain.py."""
    from megakit.training.short_schedule import shortened

    megatrons, found = loop.get_forward_backward_func, list[Any]()

    def schedule(model: Any, forward_only: bool, **options: Any) -> Any:
        if forward_only:
            return megatrons()(model=model, forward_only=True, **options)
        if not found:
            found.append(shortened(megatrons(), model[0]))
        return found[0](model=model[0], **options)

    loop.get_forward_backward_func = lambda: schedule


def use_graph(parts: Any) -> None:
    """Lets the trainer of model_trainer.py repeat its steps as a CUDA graph."""
    strategy = parts.ExactStrategy
    parts.ExactStrategy = lambda **options: strategy(**{**options, "cuda_graph": True})


def set_options(values: dict[str, Any]) -> None:
    """Gives the program its command line."""
    given = ((f"--{name}", str(value)) for name, value in values.items() if value is not None)
    sys.argv[1:] = [part for option in given for part in option]


def main() -> None:
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name not in (*OURS, *FILES):
        sys.exit(__doc__)
    job = parse_options(Job)
    clock = Clock(job)
    if name in OURS:
        train_ours(name, job, clock)
    else:
        train_on_ladder(name, job, clock)


if __name__ == "__main__":
    main()
