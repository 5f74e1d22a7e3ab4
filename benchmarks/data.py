"""The data system's speed and memory.

    python benchmarks/data.py --data-dir PATH [--write]

Compare ratios rather than figures: everything is measured in one run, and what is compared in turn.
torch gets one thread. Without MNIST in --data-dir the digits of scikit-learn take its place, and
there is no comparison with torchvision. A blend has three members of 10^9 samples each that cost
nothing; Megatron's helper is `build_blending_indices`, which its own `BlendedDataset` calls.
`--write` puts the table into RESULTS.md.
"""

import argparse
import functools
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import DATA_DIR, HEADER, Row, machine, write_section
from torch.utils.data import DataLoader, Dataset, Subset

from megakit.data import (
    BlendedDataset,
    IdentityMultiEpochDatasetWrapper,
    MultiEpochDatasetResampler,
    PRNGResampleDataset,
    permute,
    sample_generator,
    uniform,
)
from megakit.runtime import use_accelerator
from megakit.runtime.accelerator import keep_freed_memory
from mnist import files as mnist_files

NUM_RUNS = 7
BATCH_SIZE = 128
TRILLION = 10**12
WEIGHTS = [0.7, 0.2, 0.1]
# One heavy and many light members: where it matters which member is late.
UNEVEN = [900] + 100 * [1]
LENGTHS = {"10^3": 10**3, "10^6": 10**6, "10^12": TRILLION}


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


def rate(work: Callable[[], Any], count: int, unit: float = 1.0) -> list[float]:
    return [count / seconds / unit for seconds in seconds_of(work)]


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


def peak_bytes(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


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


def permutation_rows() -> list[Row]:
    def one_by_one() -> None:
        for index in range(20_000):
            permute(index, 2**40, 42)

    indices = np.arange(2**14)  # as many as the resampler maps with one call
    best = rate(lambda: permute(indices, 2**40, 42), indices.size, 1e6)
    worst = rate(lambda: permute(indices, 2**40 + 1, 42), indices.size, 1e6)
    scalar = rate(one_by_one, 20_000, 1e6)
    ratio = statistics.median(best) / statistics.median(scalar)
    return [
        Row("permute, arrays, length 2^40", best, "M/s", f"{ratio:.0f} times the rate one by one"),
        Row("permute, arrays, length 2^40 + 1", worst, "M/s", "the worst case"),
        Row("permute, one by one", scalar, "M/s"),
    ]


def trillion_rows() -> list[Row]:
    dataset = IdentityMultiEpochDatasetWrapper(Virtual(TRILLION))

    def build() -> MultiEpochDatasetResampler[Any]:
        return MultiEpochDatasetResampler(dataset)

    resampler, last = build(), TRILLION - 1
    many = MultiEpochDatasetResampler(IdentityMultiEpochDatasetWrapper(Virtual(3)), 1_000_000)
    last_item = _scaled(seconds_of(lambda: resampler[last], 10_000), 1e6)
    return [
        Row("resampler over 10^12: build", _scaled(seconds_of(build, 100), 1e3), "ms"),
        Row("resampler over 10^12: memory", [peak_bytes(build) / 1024], "KiB"),
        Row("resampler over 10^12: last item", last_item, "us"),
        Row("epoch seeds, 10^6 epochs", [many.epoch_seeds.nbytes / 1e6], "bytes each"),
    ]


def wrapper_rows() -> list[Row]:
    """What each wrapper adds to a batch read in order, and to a single sample."""
    length = 55_000
    identity = IdentityMultiEpochDatasetWrapper(Virtual(length))
    resampled: dict[str, Any] = {
        "resampler, shuffled": MultiEpochDatasetResampler(identity, 20),
        "resampler, not shuffled": MultiEpochDatasetResampler(identity, 20, shuffle=False),
        "PRNGResampleDataset": PRNGResampleDataset(Virtual(length), num_samples=20 * length),
    }
    rows = []
    for name, dataset in resampled.items():

        def read_in_order(dataset: Any = dataset) -> None:
            for start in range(0, 2**17, BATCH_SIZE):
                dataset.get_batch(np.arange(start, start + BATCH_SIZE))

        def read_one_by_one(dataset: Any = dataset) -> None:
            for index in range(5000):
                dataset[index]

        batches = _scaled(seconds_of(read_in_order), BATCH_SIZE / 2**17 * 1e6)
        ones = _scaled(seconds_of(read_one_by_one), 1e6 / 5000)
        rows.append(Row(f"{name}: batch of {BATCH_SIZE}", batches, "us"))
        rows.append(Row(f"{name}: one sample", ones, "us"))
    return rows


def flat_memory_rows() -> list[Row]:
    """How much more memory is held after an epoch than after its first hundredth."""
    length = 10_000_000
    resampler = MultiEpochDatasetResampler(IdentityMultiEpochDatasetWrapper(Virtual(length)))

    def read(first: int, last: int) -> None:
        for start in range(first, last, 5000):
            resampler.get_batch(np.arange(start, start + 5000))

    tracemalloc.start()
    try:
        read(0, length // 100)
        before, _ = tracemalloc.get_traced_memory()
        read(length // 100, length)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    gained, held = max(0, after - before) / 1024, f"{after / 1024:.0f} KiB allocated in all"
    return [Row("growth of memory over an epoch of 10^7 samples", [gained], "KiB", held)]


def random_effect_rows() -> list[Row]:
    epochs, indices = np.zeros(BATCH_SIZE, np.int64), np.arange(BATCH_SIZE)
    batched = _scaled(seconds_of(lambda: uniform(42, epochs, indices, (784,)), 100), 1e3)
    single = _scaled(seconds_of(lambda: sample_generator(42, 0, 5), 1000), 1e6)
    return [
        Row(f"uniform, 784 x {BATCH_SIZE} numbers", batched, "ms"),
        Row("sample_generator, one sample", single, "us"),
    ]


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


def loader_rows(data_dir: Path, dataset: Any) -> list[Row]:
    """The training loader against the published one and against the limit."""
    from megakit.data import GlobalBatchSampler
    from megakit.data.loader import make_loader
    from model_components import MNISTDataModule

    def loader(num_workers: int = 0, corruption: float = 0.0) -> DataLoader:
        module = MNISTDataModule(
            data_dir, BATCH_SIZE, dataset=dataset, corruption=corruption, num_workers=num_workers
        )
        module.setup("fit")
        # What ExactDataSampler makes of module.train_dataloader(), over as many samples of digits.
        module.train_set = MultiEpochDatasetResampler(module.mnist_train.dataset, None, 55_000)
        sampler = GlobalBatchSampler(55_000, BATCH_SIZE, BATCH_SIZE)
        return make_loader(module.train_dataloader(), sampler)

    ours = loader()
    ready = torch.zeros(55_000, 784, dtype=torch.uint8)
    order = torch.randperm(len(ready), generator=torch.Generator().manual_seed(1))

    def limit() -> int:
        for indices in order.split(BATCH_SIZE):
            batch = ready.index_select(0, indices).float().div_(255)  # noqa: F841 - kept, as a loop does
        return len(ours)

    works = {"ours": read_all(ours), "limit": limit}
    works["corrupted"] = read_all(loader(corruption=0.3))
    works["one worker"] = read_all(loader(num_workers=1))
    if dataset == "mnist":
        part = Subset(Published(data_dir), range(20 * BATCH_SIZE))
        works["published"] = read_all(DataLoader(part, BATCH_SIZE))
    times = in_turn(works)
    median = {name: statistics.median(values) for name, values in times.items()}
    rates = {name: [BATCH_SIZE / seconds / 1e3 for seconds in times[name]] for name in times}
    share, unit = f"{median['limit'] / median['ours']:.0%} of the limit", "thousand/s"
    against = []
    if dataset == "mnist":
        share = f"{median['published'] / median['ours']:.0f} times the published way; {share}"
        name = "torchvision's MNIST, ToTensor, DataLoader"
        against = [Row(name, rates["published"], unit, "the published way")]
    return [
        Row(f"training loader ({dataset}), batches of {BATCH_SIZE}", rates["ours"], unit, share),
        Row("the same with one worker", rates["one worker"], unit),
        *against,
        Row("limit: index_select and conversion", rates["limit"], unit),
        Row("training loader, 30% of pixels set to 0", rates["corrupted"], unit),
    ]


def make_blend(num_samples: int, weights: Sequence[float] = WEIGHTS) -> BlendedDataset:
    return BlendedDataset([(Virtual(10**9), weight) for weight in weights], num_samples)


def blend_rows(name: str, num_samples: int) -> list[Row]:
    blend, last = make_blend(num_samples), num_samples - 1
    indices = np.arange(num_samples - BATCH_SIZE, num_samples)
    builds = _scaled(seconds_of(lambda: make_blend(num_samples), 100), 1e3)
    memory = peak_bytes(lambda: make_blend(num_samples)) / 1024
    last_item = _scaled(seconds_of(lambda: blend[last], 10_000), 1e6)
    batch = _scaled(seconds_of(lambda: blend.get_batch(indices), 200), 1e6)
    return [
        Row(f"blend of {name}: build", builds, "ms"),
        Row(f"blend of {name}: peak memory of the build", [memory], "KiB"),
        Row(f"blend of {name}: last item", last_item, "us"),
        Row(f"blend of {name}: last batch of {BATCH_SIZE}", batch, "us"),
    ]


def by_megatron(weights: Any, num_samples: int) -> Any:
    """The member of each sample, as Megatron's helper computes it."""
    from megatron.core.datasets import helpers

    members, numbers = np.zeros(num_samples, np.int16), np.zeros(num_samples, np.int64)
    shares = np.array(weights) / sum(weights)
    helpers.build_blending_indices(members, numbers, shares, len(shares), num_samples, False)
    return members


def megatron_rows() -> list[Row]:
    rows = []
    for name, num_samples in list(LENGTHS.items())[:2]:

        def build(num_samples: int = num_samples) -> Any:
            return by_megatron(WEIGHTS, num_samples)

        seconds, size = _scaled(seconds_of(build), 1e3), peak_bytes(build) / 1024
        rows.append(Row(f"Megatron's helper, {name}: build", seconds, "ms"))
        rows.append(Row(f"Megatron's helper, {name}: peak memory of the build", [size], "KiB"))
    rows[-1].note = "10 bytes per sample; 10^12 samples would need 10 TB and were not tried"
    return rows


def deviation(members: Any) -> float:
    """The largest difference between a member's samples and its share, over all prefixes."""
    drawn = np.cumsum(members[:, None] == np.arange(len(UNEVEN)), axis=0)
    shares = np.arange(1, len(members) + 1)[:, None] * np.array(UNEVEN) / sum(UNEVEN)
    return float(np.abs(drawn - shares).max())


def deviation_rows() -> list[Row]:
    ours = deviation(make_blend(sum(UNEVEN), UNEVEN)._members)
    theirs = deviation(by_megatron(UNEVEN, sum(UNEVEN)))
    what = "largest difference from a member's share, one weight of 900 and 100 weights of 1"
    return [
        Row(f"{what}: blend", [ours], "samples", "below 1 for any weights"),
        Row("the same: Megatron's helper", [theirs], "samples"),
    ]


# One function for each part of the table that needs no images.
PARTS: list[Callable[[], list[Row]]] = [
    permutation_rows,
    trillion_rows,
    wrapper_rows,
    flat_memory_rows,
    random_effect_rows,
    *(functools.partial(blend_rows, *length) for length in LENGTHS.items()),
    megatron_rows,
    deviation_rows,
]


def _scaled(values: list[float], factor: float) -> list[float]:
    return [value * factor for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description="The data system's speed and memory.")
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as the scripts do
    use_accelerator("cpu")
    dataset = mnist_files.find_dataset(options.data_dir, "auto")
    caption = (
        f"{machine('megatron-core')} numpy {np.__version__}; one thread, {NUM_RUNS} runs each."
    )
    lines = ["## Data", "", caption, "", *HEADER]
    print("\n".join(lines))
    parts: list[Callable[[], list[Row]]] = [lambda: loader_rows(options.data_dir, dataset), *PARTS]
    for part in parts:
        for row in part():
            print(row, flush=True)
            lines.append(str(row))
    if options.write:
        write_section("data", "\n".join(lines))


if __name__ == "__main__":
    main()
