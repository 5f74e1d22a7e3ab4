"""Checks that a dataset keeps the rules for training with Megatron.

Each rule has a function in `rules.py` or `processes.py`, and a row in a table of
`docs/datasets.md`.
"""

import copy
from collections.abc import Callable
from typing import Any

from megakit.data.indices import EpochIndex
from megakit.testing import rules
from megakit.testing.generators import generators_restored
from megakit.testing.rules import Index
from megakit.testing.samples import assert_elements_equal as elements_equal
from megakit.testing.workers import check_interpreters, check_workers


def assert_dataset_compatible_with_megatron(
    dataset: Any,
    index: Index | None = None,
    assert_elements_equal: Callable[[Any, Any], None] = elements_equal,
    *,
    other_processes: bool = False,
    factory: Callable[[], Any] | None = None,
) -> None:
    """Check that a dataset keeps the rules for training with Megatron.

    This function reads a dozen samples several times, which takes milliseconds for most datasets
    of any length. The rules are:

    - Each index below the dataset's length has a sample.
    - Reading neither uses nor changes the global generators of torch, numpy and random.
    - An index gives the same sample each time, in any order of reading.
    - A sample does not change when other samples are read.
    - `__getitems__` and `get_batch(indices)`, if the dataset has them, agree with `__getitem__`.

    Two properties do not break a run, but are often mistakes, so they cause a warning: an index
    equal to or above the length has a sample; and two samples share memory that can be written.

    With `other_processes`, two more rules are checked, which takes some seconds: fresh interpreters
    with other hash seeds, and workers of torch's loader, read the same samples.

    Args:
        dataset: The dataset, indexed by integers or by EpochIndex.
        index: A further index to check, at least 0 and below the length. Its type determines how
            the dataset is indexed; without an index, both types are tried.
        assert_elements_equal: Raises an AssertionError if two samples differ.
        other_processes: Whether to start other processes.
        factory: Builds the dataset in the fresh interpreters, as each rank of a training run does;
            implies `other_processes`. Without a factory, the interpreters get the pickled dataset,
            so errors in its construction are not found.

    Warns:
        UserWarning: The dataset has one of the two properties.

    Raises:
        AssertionError: If a rule is broken; the error names the index, the path inside the sample,
            the likely cause and the remedy.
        DatasetLocallyNondeterministic: An AssertionError: samples differ within this process.
        DatasetDistributedNondeterministic: An AssertionError: samples may differ between ranks.
        IndexError: If `index` is not below the dataset's length.
    """

    def difference(a: Any, b: Any) -> str | None:
        try:
            assert_elements_equal(a, b)
        except AssertionError as error:
            return str(error) if assert_elements_equal is elements_equal else f"sample: {error}"
        return None

    with generators_restored():
        index = _kind_of_index(dataset) if index is None else index
        rules.check_length(dataset, index)
        indices = rules.probes(dataset, index)
        rules.check_global_generators(dataset, indices, difference)
        rules.check_same_twice(dataset, indices, difference)
        rules.check_any_order(dataset, indices, difference)
        rules.check_own_memory(dataset, index)
        rules.check_batched_forms(dataset, indices, difference)
        if other_processes or factory is not None:
            samples = [dataset[i] for i in indices]
            check_workers(dataset, indices, samples, difference)
            check_interpreters(factory or dataset, indices, samples, difference)


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
    a, b = copy.deepcopy(dataset[index_a]), dataset[index_b]
    try:
        assert_elements_equal(a, b)
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
        pass  # check_length reports this error
    return 0
