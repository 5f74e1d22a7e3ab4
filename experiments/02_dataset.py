"""2. A dataset that is a function of the index, and a data sampler.

Two tensor-parallel ranks compute one replica, so both have to load the same samples. Each rank
loads the samples itself. What is the result if a dataset draws random numbers from a generator of
the rank? And which samples does a loader with `shuffle=True` load?

The two ranks train on different images, and no error is raised. NeMo replaces the sampler of the
loader, so the loader does not shuffle. A shuffled order has to be part of the dataset.

Try: give `MegatronDataSampler` the argument `dataloader_type="cyclic"`. Does it shuffle? Then leave
out `tensor=2` in `first_samples`, so the ranks are data-parallel. Which samples does each rank
read?
"""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import DataLoader

from experiments.training import GLOBAL_BATCH, MICRO_BATCH, digits, train
from megakit.data import EpochIndex, MultiEpochDatasetWrapper
from mnist.files import read_splits
from model_components import BionemoLightningModule, MNISTCustom, MNISTDataModule

#: The micro batches of this rank. Each run has processes of its own.
BATCHES: list[dict[str, Any]] = []


class Recording(BionemoLightningModule):
    """Records the micro batches."""

    def training_step(self, batch: Any, batch_idx: int | None = None) -> Any:
        BATCHES.append(batch)
        return self(batch, batch_idx)


class Brightness(MultiEpochDatasetWrapper[Any, Any]):
    """Changes the brightness of each image at random, as a function of the index."""

    def generator(self, index: EpochIndex) -> np.random.Generator:
        return np.random.default_rng([index.epoch, index.idx])

    def apply_transform(self, sample: Any, index: EpochIndex) -> Any:
        return {**sample, "data": sample["data"] * float(self.generator(index).uniform(0.5, 1))}


class BrightnessOfRank(Brightness):
    """Draws from one generator of this rank."""

    of_rank = np.random.default_rng(int(os.environ["RANK"]))

    def generator(self, index: EpochIndex) -> np.random.Generator:
        return self.of_rank


class BrightData(MNISTDataModule):
    """Trains on images of random brightness."""

    wrapper: type[Brightness] = Brightness

    def with_random_effects(self, train: Any) -> Any:
        return self.wrapper(train)


class PlainData(pl.LightningDataModule):
    """Shuffles by torch's loader, and has no `data_sampler`, as in plain Lightning."""

    def train_dataloader(self) -> Any:
        train, *_ = read_splits(Path(), "digits", MNISTCustom.from_arrays)
        return DataLoader(train, batch_size=MICRO_BATCH, shuffle=True)


class ShufflingData(PlainData):
    """Shuffles by torch's loader, and has a `data_sampler`."""

    def __init__(self) -> None:
        super().__init__()
        self.data_sampler = MegatronDataSampler(
            1, micro_batch_size=MICRO_BATCH, global_batch_size=GLOBAL_BATCH
        )


def first_brightness(wrapper: type[Brightness]) -> str:
    """Trains, and returns the mean of the first image's pixels."""
    data = digits(BrightData)
    data.wrapper = wrapper
    train(module=Recording, data=data, tensor=2)
    return f"{float(BATCHES[0]['data'][0].mean()):.4f}"


def first_samples(data: Any) -> str:
    """Trains, and returns the indices of the first samples."""
    train(module=Recording, data=data, tensor=2)
    return ", ".join(str(int(index)) for index in BATCHES[0]["idx"])


def with_generator_per_sample() -> str:
    """The mean of the first image's pixels, with a generator that the index seeds."""
    return first_brightness(Brightness)


def without_generator_per_sample() -> str:
    """The mean of the first image's pixels, with a generator that the rank seeds."""
    return first_brightness(BrightnessOfRank)


def with_order_in_dataset() -> str:
    """The first samples, shuffled by the project's dataset."""
    return first_samples(digits())


def without_order_in_dataset() -> str:
    """The first samples of a loader with `shuffle=True`."""
    return first_samples(ShufflingData())


def without_data_sampler() -> str:
    """The same loader without the attribute `data_sampler`."""
    return first_samples(PlainData())
