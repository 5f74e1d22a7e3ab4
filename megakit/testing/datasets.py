"""Checks that a dataset keeps the rules for training with Megatron.

Each rule has a row in a table of `docs/data.md`. The error for a broken rule names the index,
the path inside the sample, and the remedy.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from megakit.data.batches import has_get_batch
from megakit.data.generators import generator_states, generators_restored, set_generators
from megakit.data.indices import EpochIndex
from megakit.testing.samples import assert_elements_equal as elements_equal, first_difference

Index = int | EpochIndex[int]
Difference = Callable[[Any, Any], str | None]

REMEDY = (
    "Compute a sample from its index alone; take random numbers from "
    "megakit.data.sample_generator(seed, epoch, index), or uniform(...) for batches."
)


class DatasetLocallyNondeterministic(AssertionError):  # noqa: N818  # BioNeMo's name
    """One process reads different samples at the same index."""


class DatasetDistributedNondeterministic(AssertionError):  # noqa: N818  # BioNeMo's name
    """One process reads equal samples, but the ranks of a job may read different ones."""


def assert_dataset_compatible_with_megatron(
    dataset: Any,
    index: Index | None = None,
    assert_elements_equal: Callable[[Any, Any], None] = elements_equal,
) -> None:
    """Check that a dataset keeps the rules for training with Megatron.

    This function reads a dozen samples several times, which takes milliseconds for most datasets
    of any length. The rules are:

    - Each index below the dataset's length has a sample.
    - Reading neither uses nor changes the global generators of torch, numpy and random.
    - An index gives the same sample each time, in any order of reading.
    - A sample does not change when other samples are read.
    - `__getitems__` and `get_batch(indices)`, if the dataset has them, agree with `__getitem__`.

    Args:
        dataset: The dataset, indexed by integers or by EpochIndex.
        index: A further index to check, at least 0 and below the length. Its type determines how
            the dataset is indexed; without an index, both types are tried.
        assert_elements_equal: Raises an AssertionError if two samples differ.

    Raises:
        AssertionError: If a rule is broken.
        DatasetLocallyNondeterministic: An AssertionError: samples differ within this process.
        DatasetDistributedNondeterministic: An AssertionError: samples may differ between ranks.
    """

    def difference(a: Any, b: Any) -> str | None:
        try:
            assert_elements_equal(a, b)
        except AssertionError as error:
            return str(error)
        return None

    with generators_restored():
        indices = _probes(dataset, _kind_of_index(dataset) if index is None else index)
        _check_generators(dataset, indices, difference)
        _check_any_order(dataset, indices, difference)
        _check_batches(dataset, indices, difference)


def assert_dataset_elements_not_equal(
    dataset: Any,
    index_a: Index = 0,
    index_b: Index = 1,
    assert_elements_equal: Callable[[Any, Any], None] = elements_equal,
) -> None:
    """Check that two indices give different samples, and that the dataset keeps the rules.

    Use it for random effects, for example with `EpochIndex(0, 5)` and `EpochIndex(1, 5)`.

    Raises:
        AssertionError: If the samples are equal, or if `assert_dataset_compatible_with_megatron`
            finds a broken rule.
    """
    for index in (index_a, index_b):
        assert_dataset_compatible_with_megatron(dataset, index, assert_elements_equal)
    try:
        assert_elements_equal(copy.deepcopy(dataset[index_a]), dataset[index_b])
    except AssertionError:
        return
    raise AssertionError(
        f"dataset[{index_a}] and dataset[{index_b}] are equal, though they should differ. Likely "
        "the random effect does not depend on the epoch or the index; seed it by both."
    )


def _kind_of_index(dataset: Any) -> Index:
    try:
        dataset[0]
    except (TypeError, AttributeError) as error:
        try:
            dataset[EpochIndex(0, 0)]
        except Exception:
            raise error from None
        return EpochIndex(0, 0)
    except IndexError:
        pass  # the dataset is empty
    return 0


def _probes(dataset: Any, index: Index) -> list[Any]:
    """Return the indices to read: 0, 1, 2, the middle, the last, and the given index."""
    length = len(dataset)
    if length < 1:
        raise AssertionError("The dataset is empty: len(dataset) is 0.")
    place = index.idx if isinstance(index, EpochIndex) else index
    places = sorted({*range(min(length, 3)), length // 2, length - 1, place})
    epochs = (index.epoch, index.epoch + 1) if isinstance(index, EpochIndex) else ()
    indices = [EpochIndex(epoch, p) for epoch in epochs for p in places] or places
    try:
        dataset[indices[-1]]
    except Exception as error:
        raise AssertionError(
            f"len(dataset) is {length}, but dataset[{indices[-1]}] fails with {error!r}. The "
            "length defines the epochs, so it must be exact."
        ) from error
    return indices


def _check_generators(dataset: Any, indices: list[Any], difference: Difference) -> None:
    """Check that samples are equal under all states of the global generators, and change none."""
    for index in indices:
        samples = []
        for seed in (1, 1, 2):
            set_generators(seed)
            before = generator_states()
            samples.append(copy.deepcopy(dataset[index]))
            after = generator_states()
            if changed := [name for name in before if before[name] != after[name]]:
                kind: type[AssertionError] = DatasetDistributedNondeterministic
                if difference(samples[-1], dataset[index]):
                    kind = DatasetLocallyNondeterministic
                raise kind(
                    f"dataset[{index}] draws from or seeds the global generator of "
                    f"{' and '.join(changed)}. Its numbers differ between ranks, and Megatron "
                    f"takes dropout and initial weights from it. {REMEDY}"
                )
        if found := difference(samples[0], samples[1]):
            raise DatasetLocallyNondeterministic(
                f"dataset[{index}] differs when read again: {found}. {REMEDY}"
            )
        if found := difference(samples[0], samples[2]):
            raise DatasetDistributedNondeterministic(
                f"dataset[{index}] depends on the state of a global generator: {found}. {REMEDY}"
            )


def _check_any_order(dataset: Any, indices: list[Any], difference: Difference) -> None:
    """Check that no sample depends on the others that are read before, or changes with them."""
    samples, copies = [], []
    for index in indices:
        samples.append(dataset[index])
        copies.append(copy.deepcopy(samples[-1]))
    for index, sample, copied in zip(indices, samples, copies, strict=True):
        if found := difference(copied, sample):
            raise AssertionError(
                f"dataset[{index}] changes when other samples are read: {found}. Return a copy "
                "(clone() or copy()), and not one buffer for every sample."
            )
    for index, copied in zip(reversed(indices), reversed(copies), strict=True):
        if found := difference(copied, dataset[index]):
            raise DatasetLocallyNondeterministic(
                f"dataset[{index}] depends on what was read before it: {found}. Ranks and restarts "
                f"read in other orders. {REMEDY}"
            )


def _check_batches(dataset: Any, indices: list[Any], difference: Difference) -> None:
    """Check that `__getitems__` and `get_batch` agree with `__getitem__`."""
    samples = [dataset[index] for index in indices]
    if hasattr(dataset, "__getitems__"):
        many = dataset.__getitems__(indices)
        unequal = list(filter(None, map(difference, samples, many)))
        if unequal or len(many) != len(samples):
            raise AssertionError(
                f"dataset.__getitems__({indices}) and the samples there differ: {unequal}."
            )
    if has_get_batch(type(dataset)):
        is_by_epoch = isinstance(indices[0], EpochIndex)
        for some in (slice(None), slice(None, None, -1), slice(1)):
            arrays = np.array(indices[some]).T
            batch = dataset.get_batch(EpochIndex(*arrays) if is_by_epoch else arrays)
            if found := first_difference(default_collate(samples[some]), batch, "batch"):
                raise AssertionError(
                    f"The collated samples {indices[some]} and their batch from dataset.get_batch "
                    f"differ: {found}. Python's ints collate to int64, its floats to float64."
                )
