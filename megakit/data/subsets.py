"""Chooses some of a dataset's samples, balanced over the classes."""

from typing import Any

import numpy as np
from torch.utils.data import Subset


def balanced_subset(dataset: Any, size: int, seed: int) -> Subset[Any]:
    """Returns a random subset, balanced over the classes.

    Samples are chosen from the classes in turn. So the classes' numbers of samples differ by at
    most one, as long as no class is exhausted. With the same seed, a smaller subset is contained in
    a larger one.

    Args:
        dataset: A dataset with `labels`, an array (N,), or a Subset of such a dataset.
        size: Number of samples; if the dataset has fewer, all its samples are chosen.
        seed: Seed of the random choice.
    """
    base: Any = dataset
    positions = np.arange(len(dataset))
    while isinstance(base, Subset):
        base, positions = base.dataset, np.asarray(base.indices)[positions]
    order = np.random.default_rng(seed).permutation(len(positions))
    labels = base.labels[positions][order]
    turn = np.empty(len(order), np.int64)
    for label in np.unique(labels):
        turn[labels == label] = np.arange((labels == label).sum())
    return Subset(dataset, order[np.argsort(turn, kind="stable")][:size].tolist())
