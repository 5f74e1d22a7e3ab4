"""The data system's speed and memory.

    python benchmarks/data.py --data-dir PATH [--write]

Compare ratios rather than figures: everything is measured in one run, and what is compared in turn.
torch gets one thread. Without MNIST in --data-dir the digits of scikit-learn take its place, and
there is no comparison with torchvision. `--write` puts the table into RESULTS.md.
"""

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import HEADER, Row, machine, write_section
from torch.utils.data import DataLoader, Dataset, Subset

from megakit.data import (
    IdentityMultiEpochDatasetWrapper,
    MultiEpochDatasetResampler,
    PRNGResampleDataset,
    permute,
    sample_generator,
    uniform,
)
from megakit.errors import UserError
from megakit.runtime import use_accelerator
from megakit.runtime.memory import keep_freed_memory
from mnist import files as mnist_files

NUM_RUNS = 7
BATCH_SIZE = 128
TRILLION = 10**12


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
    def scalar_loop(function: Callable[[int, int, int], int]) -> Callable[[], None]:
        def loop() -> None:
            for index in range(20_000):
                function(index, 2**40, 42)

        return loop

    published: Callable[[int, int, int], int]
    try:
        from bionemo.core.data.permute import permute as published  # type: ignore

        name = "bionemo-core's"
    except ImportError:
        published, name = permute, "megakit's, because bionemo-core is not importable"

    indices = np.arange(2**14)  # as many as the resampler maps with one call
    best = rate(lambda: permute(indices, 2**40, 42), indices.size, 1e6)
    worst = rate(lambda: permute(indices, 2**40 + 1, 42), indices.size, 1e6)
    scalar = rate(scalar_loop(published), 20_000, 1e6)
    ratio = statistics.median(best) / statistics.median(scalar)
    return [
        Row("permute, arrays, length 2^40", best, "M/s", f"{ratio:.0f} times the rate one by one"),
        Row(
            "permute, arrays, length 2^40 + 1",
            worst,
            "M/s",
            "the worst case: the most repeated hashes",
        ),
        Row(f"permute, one by one ({name})", scalar, "M/s"),
    ]


def trillion_rows() -> list[Row]:
    dataset = IdentityMultiEpochDatasetWrapper(Virtual(TRILLION))

    def build() -> MultiEpochDatasetResampler[Any]:
        return MultiEpochDatasetResampler(dataset)

    resampler, last = build(), TRILLION - 1
    many = MultiEpochDatasetResampler(IdentityMultiEpochDatasetWrapper(Virtual(3)), 1_000_000)
    first_item = _scaled(seconds_of(lambda: resampler[0], 10_000), 1e6)
    last_item = _scaled(seconds_of(lambda: resampler[last], 10_000), 1e6)
    return [
        Row("resampler over 10^12: build", _scaled(seconds_of(build, 100), 1e3), "ms"),
        Row("resampler over 10^12: memory", [peak_bytes(build) / 1024], "KiB"),
        Row("resampler over 10^12: first item", first_item, "us"),
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
    """The training loader against the published one, against the limit, and the forward pass."""
    from megakit.data import GlobalBatchSampler
    from megakit.data.loader import make_loader
    from megakit.testing import distributed_model_parallel_state
    from model_components import MNISTDataModule, PretrainConfig

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
    images = next(iter(ours))["data"].bfloat16()
    module = MNISTDataModule(data_dir, dataset=dataset)
    module.setup("fit")
    base: Any = module.mnist_train.dataset
    while not hasattr(base, "images"):
        base = base.dataset
    ready = torch.from_numpy(np.array(base.images)).flatten(1)
    generator = torch.Generator().manual_seed(1)
    order = torch.randint(len(ready), (len(ours) * BATCH_SIZE,), generator=generator)

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
    with distributed_model_parallel_state(accelerator="cpu"):
        model = PretrainConfig().configure_model().bfloat16()

        def forward() -> int:
            for _ in range(200):
                model(images)
            return 200

        works["forward"] = forward
        times = in_turn(works)

    median = {name: statistics.median(values) for name, values in times.items()}
    rates = {name: [BATCH_SIZE / seconds / 1e3 for seconds in times[name]] for name in times}
    share = f"{median['limit'] / median['ours']:.0%} of the limit"
    unit, corruption = "thousand/s", median["corrupted"] - median["ours"]
    against = []
    if dataset == "mnist":
        share = f"{median['published'] / median['ours']:.0f} times the published way; {share}"
        name = "torchvision's MNIST, ToTensor, DataLoader"
        against = [Row(name, rates["published"], unit, "the published way")]
    else:
        share += "; torchvision's not measured: no MNIST in --data-dir"
    return [
        Row(f"training loader ({dataset}), batches of {BATCH_SIZE}", rates["ours"], unit, share),
        Row("the same with one worker", rates["one worker"], unit),
        *against,
        Row("limit: index_select and conversion", rates["limit"], unit),
        Row("training loader, 30% of pixels set to 0", rates["corrupted"], unit),
        Row("a forward pass of the autoencoder", _scaled(times["forward"], 1e6), "us"),
        Row(
            "time that setting pixels to 0 adds to a batch",
            [corruption * 1e6],
            "us",
            f"{corruption / median['forward']:.0%} of the forward pass",
        ),
    ]


def start_rows(data_dir: Path, dataset: Any) -> list[Row]:
    """What a start spends on its data, the files being in the system's cache."""
    from model_components import MNISTDataModule

    def find() -> None:
        mnist_files.find_dataset(data_dir, dataset)

    def set_up() -> None:
        MNISTDataModule(data_dir, dataset=dataset).setup("fit")

    return [
        Row(f"finding and checking the files ({dataset})", _scaled(seconds_of(find), 1e3), "ms"),
        Row("MNISTDataModule.setup", _scaled(seconds_of(set_up), 1e3), "ms"),
    ]


# One function for each part of the table that needs no images.
PARTS: list[Callable[[], list[Row]]] = [
    permutation_rows,
    trillion_rows,
    wrapper_rows,
    flat_memory_rows,
    random_effect_rows,
]


def _scaled(values: list[float], factor: float) -> list[float]:
    return [value * factor for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description="The data system's speed and memory.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as the scripts do
    use_accelerator("cpu")
    try:
        mnist_files.check_mnist(options.data_dir)
        dataset = "mnist"
    except UserError:
        dataset = "digits"
    caption = f"{machine()} numpy {np.__version__}; one thread, {NUM_RUNS} runs each."
    lines = ["## Data", "", caption, "", *HEADER]
    print("\n".join(lines))
    with_images = [lambda: loader_rows(options.data_dir, dataset)]
    with_images += [lambda: start_rows(options.data_dir, dataset)]
    for part in with_images + PARTS:
        for row in part():
            print(row, flush=True)
            lines.append(str(row))
    if options.write:
        write_section("data", "\n".join(lines))


if __name__ == "__main__":
    main()
