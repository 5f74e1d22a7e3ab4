"""What a step, a save, a load and the order of the samples cost if something gets larger.

    python benchmarks/growth.py [--write]

model_pretrain.py on the bundled digits, in float32, with one thread for each rank. A load is that
of a resumed run: verification by hash, weights, optimizer. TMPDIR names the disk: 100 million
weights need 2.5 GB there, and 4 GB of memory. `--write` puts the table into RESULTS.md.
"""

import importlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from data import BATCH_SIZE, Virtual, seconds_of
from report import machine, parser_of, short, table, write_section

from megakit.checkpoints.manifest import verify
from megakit.data import IdentityMultiEpochDatasetWrapper, MultiEpochDatasetResampler
from megakit.job.layout import Layout
from megakit.testing import Ranks

STEPS, WARM_UP = 30, 10
#: Weights of the autoencoder for each feature of its hidden layers, and the others.
PER_FEATURE, OTHERS = 2 * 28 * 28 + 8, 28 * 28 + 3
HEADER = "| what | sizes | at each size | ten times the smaller | ten times the larger |"
NOTES = f"""
Strokes separate the sizes. The last two columns compare the smaller half of the sizes and the
larger half; 10 times is as much as the work grows. A step is the median of {STEPS - WARM_UP}, a
save the faster of two.

- A step has a constant part, which is most of it below some 256 samples or features.
- All ranks share this machine's cores, and each waits for the gradients of the others.
- A checkpoint has 12 bytes for each weight: the weight and Adam's two moments, in float32. A save
  copies none of them in memory. Its processor time is the archive's checksum, sha256, and the
  system's copy into the page cache. That copy takes 6 times as long in memory that a virtual
  machine has not used before, so large saves and loads may grow faster than their size.
- A save writes in several threads, so its processor time may exceed its own. What a save takes
  longer than its processor time is the wait for the processor and the disk. The disk may stall:
  of 40 plain loops, one took 180 s to write 1.2 GB, and the others about 1.3 s.
- A load keeps 8 bytes for each weight, Adam's moments; its memory is the sum of what verification,
  weights and optimizer need at most. It reads from the page cache here. Its constant part is an
  import of torch's distributed tensors, at the first load of a process.
- The order of a batch is computed from its indices. It takes longest just above a power of two,
  where half of the hashes are beyond the length, whatever the length is. Only the seeds of the
  epochs are kept, 8 bytes for each.
"""
#: Seconds, processor seconds, and the peak of the memory above what was held before, in MB.
Cost = tuple[float, float, float]


def measured(function: Any, costs: list[Cost]) -> Callable[..., Any]:
    """Returns the function, whose calls note what they cost; the disk has nothing to do before."""

    def call(*args: Any) -> Any:
        os.sync()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what the process holds
        held, began, busy = memory("VmRSS:"), time.perf_counter(), time.process_time()
        result = function(*args)
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        costs.append((seconds, busy, max(0.1, memory("VmHWM:") - held)))
        return result

    return call


def memory(name: str) -> float:
    """Returns an entry of this process's status, in MB."""
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index(name) + 1]) / 1024


def train(
    folder: Path,
    layout: Layout,
    hidden_size: int,
    steps: int = STEPS,
    save_interval: int = STEPS,
    resume: str | None = None,
) -> tuple[list[float], list[Cost], list[Cost], str]:
    """Pretrains on a rank.

    Returns:
        When each step ended, the costs of the saves and of the parts of a load, the checkpoint.
    """
    import lightning.pytorch as pl
    from parallel import jobs

    from megakit.training import train

    ends: list[float] = []
    saves: list[Cost] = []
    loads: list[Cost] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.perf_counter())

    script = importlib.import_module("model_pretrain")
    sizes = {"hidden_size": hidden_size, "global_batch_size": layout.global_batch_size}
    intervals = {"max_steps": steps, "val_interval": steps, "save_interval": save_interval}
    options = jobs.options_of("pretrain", folder, **sizes, **intervals)
    run = jobs.make_run(script.PRETRAIN, options, layout)
    module, data, trainer = jobs.built_by(script.pretrain, run)
    trainer.callbacks.append(Watch())
    writer, strategy = trainer.checkpoint_callback, trainer.strategy
    writer.save = measured(writer.save, saves)
    for name in ("load_checkpoint", "load_optimizer_state_dict"):
        setattr(strategy, name, measured(getattr(strategy, name), loads))
    if resume is not None:
        measured(verify, loads)(Path(resume))
    train(model=module, data=data, trainer=trainer, resume=resume)
    return ends, saves, loads, writer.last_model_path


def row(what: str, sizes: Sequence[float], values: Sequence[float]) -> str:
    """Lists a cost by size, and what ten times as much costs in each half of the sizes."""
    x, y = np.log10(sizes), np.log10(values)
    parts = ([0, len(x) // 2], [len(x) // 2, -1])
    grown = (f"{10 ** (np.diff(y[ends]) / np.diff(x[ends]))[0]:.2g} times" for ends in parts)
    figures, results = (" / ".join(map(short, numbers)) for numbers in (sizes, values))
    return f"| {what} | {figures} | {results} | {' | '.join(grown)} |"


def step_rows(pool: Ranks) -> list[str]:
    """The step."""

    def milliseconds(
        ranks: int = 1, micro: int = 128, number: int = 1, hidden_size: int = 64
    ) -> float:
        layout = Layout(ranks, 1, 1, 1, ranks * micro * number, micro)
        with tempfile.TemporaryDirectory() as folder:
            ends = pool.run(train, Path(folder), layout, hidden_size, world_size=ranks)[0][0]
        return 1000 * float(np.median(np.diff(ends[WARM_UP:])))

    series = {
        "micro": ("samples in its micro batch", [32, 128, 512, 2048, 8192]),
        "hidden_size": ("`--hidden-size`", [64, 256, 1024, 4096]),
        "number": ("micro batches of 128", [1, 4, 8, 32]),
        "ranks": ("data-parallel ranks, each with a micro batch of 128", [1, 2, 4]),
    }
    return [
        row(f"a step, ms, by {what}", sizes, [milliseconds(**{name: size}) for size in sizes])
        for name, (what, sizes) in series.items()
    ]


def checkpoint_costs(pool: Ranks, hidden_size: int) -> dict[str, float]:
    """Saves three times, loads in another process, and writes as many bytes by a plain loop."""
    layout, plain = Layout(1, 1, 1, 1, 8, 8), list[Cost]()
    with tempfile.TemporaryDirectory() as folder:
        begin = (train, Path(folder), layout, hidden_size)
        ((_, saves, _, checkpoint),) = pool.run(*begin, 3, 1, world_size=1)
        ((_, _, loads, checkpoint),) = pool.run(*begin, 4, 4, checkpoint, world_size=1)
        size = sum(path.stat().st_size for path in Path(checkpoint).rglob("*.*"))
    with tempfile.TemporaryFile() as file:
        block = os.urandom(2**20)

        def write() -> None:
            for _ in range(0, size, len(block)):
                file.write(block)
            os.fsync(file.fileno())

        measured(write, plain)()
    save, load = np.min(saves[1:], axis=0), np.sum(loads, axis=0)
    return {
        "a save, s": save[0],
        "a plain loop that writes as many bytes, s": plain[0][0],
        "a load, s": load[0],
        "memory of a load, MB": load[2],
        "the first save of a process, s": saves[0][0],
        "processor time of a save, s": save[1],
        "memory of a save, MB": save[2],
        "bytes on disk for each weight": size / (hidden_size * PER_FEATURE + OTHERS),
    }


def checkpoint_rows(pool: Ranks) -> list[str]:
    """Saves and loads."""
    millions = (0.1, 1, 3, 10, 30, 100)
    costs = [checkpoint_costs(pool, round(1e6 * number / PER_FEATURE)) for number in millions]
    return [
        row(f"{what}, by millions of weights", millions, [one[what] for one in costs])
        for what in costs[0]
    ]


def order_rows() -> list[str]:
    """The order of the samples: a batch of it, and what it keeps."""
    sizes, found = [10**power for power in (5, 7, 9, 10, 12)], []
    for size in sizes:
        works = (
            partial(order(size, size).get_batch, np.arange(BATCH_SIZE)),
            partial(order, 55_000, size),
        )
        found.append([1e6 * float(np.median(seconds_of(work, 10))) for work in works])
    looked_up, built = zip(*found, strict=True)
    millions = [size / 1e6 for size in sizes]
    return [
        row(
            "the order of a batch, us, by millions of samples in the data set", millions, looked_up
        ),
        row(
            "the seeds of the epochs, us, by millions of samples drawn from 55,000", millions, built
        ),
    ]


def order(images: int, drawn: int) -> MultiEpochDatasetResampler[int]:
    """Returns the order of so many samples."""
    return MultiEpochDatasetResampler(
        IdentityMultiEpochDatasetWrapper(Virtual(images)), None, drawn
    )


def main() -> None:
    parser = parser_of("What larger models, batches and data cost.", needs_images=False)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with Ranks(4, timeout=600) as pool:
        steps, checkpoints = step_rows(pool), checkpoint_rows(pool)
    rows = table(HEADER, [*steps, *checkpoints, *order_rows()])
    where = machine("nemo_toolkit", "megatron-core").removesuffix("; median, lowest to highest.")
    text = "\n".join(["## Growth", "", f"{where}.", NOTES, *rows])
    print(text)
    if options.write:
        write_section("growth", text)


if __name__ == "__main__":
    main()
