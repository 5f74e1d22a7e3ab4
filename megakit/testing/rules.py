"""Has a function for each rule of datasets that can be checked within one process.

The error for a broken rule names the index, the path inside the sample, the likely cause and the
remedy.
"""

import copy
import itertools
import warnings
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from megakit.data.batches import has_get_batch
from megakit.data.blending import BlendedDataset, is_indexed_by_epoch
from megakit.data.epochs import MultiEpochDatasetResampler
from megakit.data.indices import EpochIndex
from megakit.data.resampling import PRNGResampleDataset
from megakit.testing.generators import (
    changed_generators,
    generator_states,
    seed_calls,
    set_generators,
)
from megakit.testing.samples import (
    DatasetDistributedNondeterministic,
    DatasetLocallyNondeterministic,
    Difference,
    first_difference,
    shared_memory,
)

Index = int | EpochIndex[int]

USE_OWN_GENERATOR = (
    "Take random numbers from megakit.data.sample_generator(seed, epoch, index), or uniform(...) "
    "for batches."
)
USE_ONE_FUNCTION = "Likely causes: a missing transform, or another order. Use one function in both."


def probes(dataset: Any, index: Index, num_epochs: int = 2) -> list[Index]:
    """Return the indices to read: 0, 1, 2, the middle, the last, and the given index."""
    length, place = len(dataset), _place(index)
    places = [p for p in sorted({0, 1, 2, length // 2, length - 1, place}) if 0 <= p < length]
    if isinstance(index, EpochIndex):
        epochs = range(index.epoch, index.epoch + num_epochs)
        return [EpochIndex(epoch, place) for epoch in epochs for place in places]
    return list(places)


def check_length(dataset: Any, index: Index) -> None:
    """Check that all indices below the dataset's length have a sample."""
    length = len(dataset)
    if length < 1:
        raise AssertionError("The dataset is empty: len(dataset) is 0.")
    if not 0 <= _place(index) < length:
        raise IndexError(f"dataset[{index}] does not exist: len(dataset) is {length}.")
    last, beyond = _at(index, length - 1), _at(index, length)
    try:
        dataset[last]
    except Exception as error:
        likely = (
            "Likely __len__ counts samples that were left out. The length defines the epochs, so "
            "make it exact."
        )
        if isinstance(error, AttributeError | TypeError):
            likely = (
                "Likely the dataset needs the other type of index: give index=0 or "
                "index=EpochIndex(0, 0)."
            )
        raise AssertionError(
            f"len(dataset) is {length}, but dataset[{last}] fails with {error!r}. {likely}"
        ) from error
    try:
        dataset[beyond]
    except Exception:
        pass  # any exception is accepted
    else:
        _warn(
            f"len(dataset) is {length}, and dataset[{beyond}] gives a sample, too. If __len__ is "
            "too small, training never reads the samples from there on. Raise an IndexError from "
            "the length on to make such a mistake visible."
        )
    if len(dataset) != length:
        raise AssertionError(
            f"len(dataset) was {length}, and {len(dataset)} after samples were read. The length "
            "at the start of training defines the epochs, so fix it there."
        )


def check_global_generators(dataset: Any, indices: list[Index], difference: Difference) -> None:
    """Check that reading neither uses nor changes the global random generators."""
    for index in indices:
        samples = []
        for state in (1, 1, 2):
            set_generators(state)
            before = generator_states()
            with seed_calls() as calls:
                samples.append(copy.deepcopy(dataset[index]))
            if calls:
                raise _nondeterminism(dataset, index, difference)(
                    f"dataset[{index}] calls {calls[0]}, which seeds a generator that Megatron "
                    f"uses, too. {USE_OWN_GENERATOR}"
                )
            if changed := changed_generators(before, generator_states()):
                raise _nondeterminism(dataset, index, difference)(
                    f"dataset[{index}] draws from or changes the global generator of "
                    f"{' and '.join(changed)}. The numbers differ between ranks, and Megatron's "
                    f"own random numbers (dropout) change. {USE_OWN_GENERATOR}"
                )
        found = difference(samples[0], samples[2])
        if found and not difference(samples[0], samples[1]):
            raise DatasetDistributedNondeterministic(
                f"dataset[{index}] depends on the state of a global generator: {found}. Likely it "
                f"draws from the generator and restores the state. {USE_OWN_GENERATOR}"
            )


def check_same_twice(dataset: Any, indices: list[Index], difference: Difference) -> None:
    """Check that an index gives the same sample when it is read again."""
    for index in indices:
        if found := difference(copy.deepcopy(dataset[index]), dataset[index]):
            raise DatasetLocallyNondeterministic(
                f"dataset[{index}] differs when read again: {found}. Likely causes: a generator "
                "without a seed, one generator for all samples that goes on with each sample, or "
                f"the time. {USE_OWN_GENERATOR}"
            )


def check_any_order(dataset: Any, indices: list[Index], difference: Difference) -> None:
    """Check that a sample does not depend on the samples that were read before."""
    expected = [copy.deepcopy(dataset[index]) for index in indices]
    backwards = list(reversed(range(len(indices))))
    for place in backwards + backwards[::2] + backwards[1::2]:
        if found := difference(expected[place], dataset[indices[place]]):
            raise DatasetLocallyNondeterministic(
                f"dataset[{indices[place]}] depends on what was read before it: {found}. Likely "
                "the dataset stores its last index, or reads a file or a generator in order. "
                "Ranks and restarts read in other orders, so compute a sample from its index "
                f"alone. {USE_OWN_GENERATOR}"
            )


def check_own_memory(dataset: Any, index: Index) -> None:
    """Check that no sample changes when another one is read; warn of shared memory."""
    if isinstance(dataset, PRNGResampleDataset):  # may draw a sample twice: check the inner dataset
        return check_own_memory(dataset.dataset, 0)
    if isinstance(dataset, BlendedDataset):  # the same holds for each member
        for member in dataset.datasets:
            check_own_memory(member, EpochIndex(0, 0) if is_indexed_by_epoch(member) else 0)
        return None
    if isinstance(dataset, MultiEpochDatasetResampler):  # draws samples twice after one epoch
        indices: list[Index] = list(range(min(len(dataset), len(dataset.dataset), 6)))
    else:
        indices = probes(dataset, index, num_epochs=1)
    samples, copies = [], []
    for probe in indices:
        samples.append(dataset[probe])
        copies.append(copy.deepcopy(samples[-1]))
    for probe, sample, copied in zip(indices, samples, copies, strict=True):
        if found := first_difference(copied, sample):
            raise AssertionError(
                f"dataset[{probe}] changes when other samples are read: {found}. Likely one buffer "
                "is filled for every sample. Return a copy (clone() or copy())."
            )
    for a, b in itertools.combinations(range(len(indices)), 2):
        if paths := shared_memory(samples[a], samples[b]):
            return _warn(
                f"dataset[{indices[a]}] and dataset[{indices[b]}] share memory, at {paths[0]} and "
                f"{paths[1]}. A transform that changes one sample in place would change the other. "
                "Return a copy (clone() or copy()), or make the array read-only."
            )
    return None


def check_batched_forms(dataset: Any, indices: list[Index], difference: Difference) -> None:
    """Check that `__getitems__` and `get_batch` agree with `__getitem__`."""
    if callable(getattr(dataset, "__getitems__", None)):
        many = dataset.__getitems__(list(indices))
        if len(many) != len(indices):
            raise AssertionError(
                f"dataset.__getitems__ gives {len(many)} samples for {len(indices)} indices. It "
                "must return a list with one sample for each index, in the order of the indices."
            )
        for index, sample in zip(indices, many, strict=True):
            if found := difference(dataset[index], sample):
                raise AssertionError(
                    f"dataset[{index}] and its sample from dataset.__getitems__ differ: {found}. "
                    f"{USE_ONE_FUNCTION}"
                )
    if has_get_batch(type(dataset)):
        for chosen in (indices, indices[:1], indices[::-1]):
            expected = default_collate([dataset[index] for index in chosen])
            if found := first_difference(expected, dataset.get_batch(_as_arrays(chosen)), "batch"):
                raise AssertionError(
                    f"The collated samples {chosen} and their batch from dataset.get_batch differ: "
                    f"{found}. {USE_ONE_FUNCTION} Python's ints collate to int64, its floats to "
                    "float64."
                )


def _nondeterminism(dataset: Any, index: Index, difference: Difference) -> type[AssertionError]:
    """Return the error for a dataset that uses a global generator."""
    if difference(copy.deepcopy(dataset[index]), dataset[index]):
        return DatasetLocallyNondeterministic
    return DatasetDistributedNondeterministic


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)  # the line that calls the public function


def _place(index: Index) -> int:
    return index.idx if isinstance(index, EpochIndex) else index


def _at(index: Index, place: int) -> Index:
    return EpochIndex(index.epoch, place) if isinstance(index, EpochIndex) else place


def _as_arrays(indices: list[Any]) -> Any:
    if isinstance(indices[0], EpochIndex):
        return EpochIndex(*(np.array(field, np.int64) for field in zip(*indices, strict=True)))
    return np.array(indices, np.int64)
