"""Selects a subset of a dataset."""

from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset


def balanced_subset(dataset: Dataset[Any], size: int, seed: int) -> Subset:
    """Returns a random subset of a classification dataset, balanced over its classes.

    Samples are chosen from the classes in turn. So the classes' numbers of samples differ by at
    most one, as long as no class is exhausted. With the same seed, a smaller subset is contained in
    a larger one.

    Args:
        dataset: A dataset with `labels`, an array (N,), or a Subset of such a dataset.
        size: Number of samples; if the dataset has fewer, all its samples are chosen.
        seed: Seed of the random choice.

    Raises:
        TypeError: If the dataset has no labels.
    """
    base: Any = dataset
    positions = np.arange(len(base))
    while isinstance(base, Subset):
        base, positions = base.dataset, np.asarray(base.indices)[positions]
    if not hasattr(base, "labels"):
        raise TypeError(f"a {type(base).__name__} has no `labels`, an array with one per sample.")
    labels = np.asarray(base.labels)[positions]
    order = np.random.default_rng(seed).permutation(len(labels))
    turn = np.empty(len(order), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels[order] == label)
        turn[members] = np.arange(len(members))
    return Subset(dataset, order[np.argsort(turn, kind="stable")][:size].tolist())
