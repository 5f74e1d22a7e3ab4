"""The speed of the data system; growth.py has the order of the samples.

    python benchmarks/data.py --data-dir PATH [--write]

Compare ratios rather than figures: everything is measured in one run, and what is compared in turn.
torch gets one thread. Megatron's helper is `build_blending_indices`, which its own `BlendedDataset`
calls.
`--write` puts the table into RESULTS.md.
"""

import statistics
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import HEADER, Row, machine, parser_of, write_section
from torch.utils.data import DataLoader, Dataset, Subset

from megakit.data import BlendedDataset
from megakit.runtime import use_accelerator
from megakit.runtime.accelerator import keep_freed_memory

NUM_RUNS = 7
BATCH_SIZE = 128


def seconds_of(work: Callable[[], Any], repeats: int = 1) -> list[float]:
    """Time NUM_RUNS runs of `repeats` calls each, after one that warms up; seconds per call."""
    work()
    runs = []
    for _ in range(NUM_RUNS):
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        runs.append((time.perf_counter() - start) / repeats)
    return runs


def in_turn(works: dict[str, Callable[[], int]]) -> dict[str, list[float]]:
    """Seconds per item of each work, which returns how many items it did.

    The works take turns, so that a machine that slows down slows all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for run in range(NUM_RUNS + 1):
        for name, work in works.items():
            start = time.perf_counter()
            count = work()
            if run:  # the first one warms up
                seconds[name].append((time.perf_counter() - start) / count)
    return seconds


class Virtual:
    """A dataset of any length that costs nothing: each sample is its index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index

    def get_batch(self, indices: Any) -> torch.Tensor:
        return torch.from_numpy(indices)


class Published(Dataset):
    """The published way: torchvision's MNIST with ToTensor, as dictionaries."""

    def __init__(self, data_dir: Path) -> None:
        from torchvision.datasets import MNIST
        from torchvision.transforms import ToTensor

        self.mnist = MNIST(str(data_dir), train=True, transform=ToTensor())

    def __len__(self) -> int:
        return len(self.mnist)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = self.mnist[index]
        return {"data": x, "label": y, "idx": index}


def read_all(batches: Any) -> Callable[[], int]:
    def read() -> int:
        count = 0
        for _ in batches:
            count += 1
        return count

    return read


def loader_rows(data_dir: Path) -> list[Row]:
    """The training loader against the published one."""
    from megakit.data import GlobalBatchSampler
    from megakit.data.loader import make_loader
    from model_components import MNISTDataModule

    def loader(num_workers: int = 0, corruption: float = 0.0) -> DataLoader:
        options: dict[str, Any] = {"corruption": corruption, "num_workers": num_workers}
        module = MNISTDataModule(data_dir, BATCH_SIZE, dataset="mnist", **options)
        module.setup("fit")
        # What ExactDataSampler makes of module.train_dataloader().
        sampler = GlobalBatchSampler(55_000, BATCH_SIZE, BATCH_SIZE)
        return make_loader(module.train_dataloader(), sampler)

    works = {"ours": read_all(loader())}
    works["corrupted"] = read_all(loader(corruption=0.3))
    works["one worker"] = read_all(loader(num_workers=1))
    part = Subset(Published(data_dir), range(20 * BATCH_SIZE))
    works["published"] = read_all(DataLoader(part, BATCH_SIZE))
    times = in_turn(works)
    rates = {name: [BATCH_SIZE / seconds / 1e3 for seconds in times[name]] for name in times}
    ratio = statistics.median(times["published"]) / statistics.median(times["ours"])
    name, unit = f"training loader, batches of {BATCH_SIZE}", "thousand/s"
    return [
        Row(name, rates["ours"], unit, f"{ratio:.0f} times the published way"),
        Row("the same with one worker", rates["one worker"], unit),
        Row("torchvision's MNIST, ToTensor, DataLoader", rates["published"], unit),
        Row("training loader, 30% of pixels set to 0", rates["corrupted"], unit),
    ]


def blend_rows() -> list[Row]:
    """A blend of 10^12 samples of three members, and the first 10^6 by Megatron's helper."""
    from megatron.core.datasets import helpers

    weights = [0.7, 0.2, 0.1]

    def build() -> BlendedDataset:
        return BlendedDataset([(Virtual(10**9), weight) for weight in weights], 10**12)

    def build_megatrons() -> None:
        members, numbers = np.zeros(10**6, np.int16), np.zeros(10**6, np.int64)
        shares = np.array(weights)
        helpers.build_blending_indices(members, numbers, shares, len(shares), 10**6, False)

    blend = build()
    indices = np.arange(10**12 - BATCH_SIZE, 10**12)
    last, batch = (lambda: blend[10**12 - 1]), (lambda: blend.get_batch(indices))
    return [
        Row("blend of 10^12: build", _scaled(seconds_of(build, 100), 1e3), "ms"),
        Row("blend of 10^12: last item", _scaled(seconds_of(last, 10_000), 1e6), "us"),
        Row(
            f"blend of 10^12: last batch of {BATCH_SIZE}",
            _scaled(seconds_of(batch, 200), 1e6),
            "us",
        ),
        Row("Megatron's helper, 10^6: build", _scaled(seconds_of(build_megatrons), 1e3), "ms"),
    ]


def _scaled(values: list[float], factor: float) -> list[float]:
    return [value * factor for value in values]


def main() -> None:
    parser = parser_of("The speed of the data system.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as the scripts do
    use_accelerator("cpu")
    caption = (
        f"{machine('megatron-core')} numpy {np.__version__}; one thread, {NUM_RUNS} runs each."
    )
    lines = ["## Data", "", caption, "", *HEADER]
    print("\n".join(lines))
    for row in chain(loader_rows(options.data_dir), blend_rows()):
        print(row, flush=True)
        lines.append(str(row))
    if options.write:
        write_section("data", "\n".join(lines))


if __name__ == "__main__":
    main()
