"""Datasets that each break one rule, beside ones that keep it."""

import random

import numpy as np
import torch
from numpy.random import default_rng
from torch.utils.data import Dataset

from megakit.data import MultiEpochDatasetWrapper, sample_generator


class Good(Dataset):
    """Keeps every rule; those below change one thing."""

    def __init__(self, length=10):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return {"x": self.values(index), "more": [(float("nan"), f"name {index}"), None]}

    def values(self, index):
        return torch.arange(6.0).reshape(2, 3) + index


def having(name, values):
    """A dataset that differs from the good one by its values, each a function of its index."""
    return type(name, (Good,), {"values": lambda self, index: values(index)})


Seeded = having("Seeded", lambda index: sample_generator(1, 0, index).random((2, 3)))
TorchGlobal = having("TorchGlobal", lambda index: torch.rand(2, 3))
PythonGlobal = having("PythonGlobal", lambda index: random.random())
NumpySeed = having("NumpySeed", lambda index: (np.random.seed(index), np.random.rand(2, 3))[1])
Unseeded = having("Unseeded", lambda index: {"deep": [index, (0, default_rng().random(4))]})


class PlainBatches(Dataset):
    """Samples that collate, as `None` above does not."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if not 0 <= index < 10:
            raise IndexError(index)
        return {"x": torch.arange(6.0).reshape(2, 3) + index, "idx": index}

    def __getitems__(self, indices):
        return [self[index] for index in indices]

    def get_batch(self, indices):
        indices = torch.from_numpy(indices)
        return {"x": torch.arange(6.0).reshape(2, 3) + indices[:, None, None], "idx": indices}


class ForkedDraw(Good):
    def values(self, index):
        with torch.random.fork_rng(devices=[]):
            return torch.rand(2, 3)


class Remembers(Good):
    """Reads on from its last index, as the published PRNGResampleDataset could have."""

    last = value = None

    def values(self, index):
        if index != self.last:
            self.value = (index, self.last)
            self.last = index
        return self.value


class OneBuffer(Good):
    buffer = torch.zeros(3)

    def values(self, index):
        return self.buffer.fill_(index)


class TooLong(Good):
    def __getitem__(self, index):
        if index == 9:
            raise IndexError(index)
        return super().__getitem__(index)


class OtherItems(PlainBatches):
    def __getitems__(self, indices):
        return [self[index] for index in sorted(indices, reverse=True)]


class SortedBatch(PlainBatches):
    def get_batch(self, indices):
        return super().get_batch(np.sort(indices))


class Epochs(MultiEpochDatasetWrapper):
    def __init__(self):
        super().__init__(PlainBatches())

    def apply_transform(self, sample, index):
        return {**sample, "noise": sample_generator(1, *index).random(3)}


class UnseededEpochs(Epochs):
    def apply_transform(self, sample, index):
        return {**sample, "noise": default_rng(index.idx % 2 or None).random(3)}


class SameEpochs(Epochs):
    def apply_transform(self, sample, index):
        return {**sample, "noise": sample_generator(1, 0, index.idx).random(3)}
