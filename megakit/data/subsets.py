"""Choosing a part of a dataset."""

from typing import Any

import numpy as np
from torch.utils.data import Subset


def balanced_subset(dataset: Any, size: int, seed: int) -> Subset:
    """A random part of a classification dataset, balanced over its classes.

    The classes are dealt out in turn, so that their numbers differ by one at most while each has
    samples left; of two sizes, the smaller part is contained in the larger.

    Args:
        dataset: Has `labels`, an array (N,), or is a Subset of one that has.
        size: Samples to choose; all of them if there are fewer.
        seed: Decides which.

    Raises:
        TypeError: If the dataset has no labels.
    """
    base: Any = dataset
    positions = np.arange(len(dataset))
    while isinstance(base, Subset):
        base, positions = base.dataset, np.asarray(base.indices)[positions]
    if not hasattr(base, "labels"):
        raise TypeError(f"a {type(base).__name__} has no `labels`, an array with one per sample.")
    labels = np.asarray(base.labels)[positions]
    order = np.random.default_rng(seed).permutation(len(dataset))
    turn = np.empty(len(order), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels[order] == label)
        turn[members] = np.arange(len(members))
    return Subset(dataset, order[np.argsort(turn, kind="stable")][:size].tolist())
