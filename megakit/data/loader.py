"""Builds data loaders that fetch whole batches and mark padding."""

import atexit
import functools
import itertools
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert

from megakit.data.batches import fetch_batch, fetch_samples
from megakit.data.prefetch import can_be_prefetched, prefetch
from megakit.runtime.patching import existing
from megakit.runtime.shared_memory import check_shared_memory, exit_on_failed_send
from megakit.runtime.signals import die_with_parent, ignore_signals

T = TypeVar("T")

#: Seconds to wait for a batch of the workers, unless the template has a timeout.
WORKER_TIMEOUT = 600


class BatchSampler(Protocol):
    """Yields arrays of indices, all of the same size; negative indices are padding."""

    num_samples: int
    end: int

    def __iter__(self) -> Iterator[NDArray[np.int64]]: ...

    def __len__(self) -> int: ...


class _WholeBatches(Dataset[Any]):
    """Wraps a dataset so that `__getitems__` returns a collated batch instead of a list."""

    def __init__(
        self,
        dataset: Dataset[Any],
        padding_weight: float | None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.dataset, self.padding_weight, self.collate = dataset, padding_weight, collate

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitems__(self, indices: NDArray[np.int64]) -> Any:
        is_sample = indices >= 0
        # Padding repeats sample 0. Any sample is possible here, as the weight of padding is 0.
        samples = np.where(is_sample, indices, 0)
        if self.collate is None:
            batch = fetch_batch(self.dataset, samples)
        else:
            batch = self.collate(fetch_samples(self.dataset, samples))
        if self.padding_weight is None:
            return batch
        if not isinstance(batch, dict):
            raise TypeError(
                f"an evaluation batch is a {type(batch).__name__}; it has to be a dict, so "
                "that batch['loss_mask'] can mark padding. Return dicts from __getitem__."
            )
        weights = torch.from_numpy(is_sample * np.float32(self.padding_weight))
        if "loss_mask" in batch:  # from the dataset, for example with one weight per token
            mask = batch["loss_mask"]
            weights = mask * weights.view(-1, *[1] * (mask.dim() - 1))
        return {**batch, "loss_mask": weights}


#: Iterators with workers, and the workers' processes, which outlive an iterator if they hang.
_ITERATORS: weakref.WeakSet[Any] = weakref.WeakSet()
_WORKERS: weakref.WeakSet[Any] = weakref.WeakSet()


class _Loader(DataLoader):
    """Skips torch's iterator if there are no workers, as it takes as long as a batch."""

    def __iter__(self) -> Any:
        if self.num_workers or self.pin_memory:
            iterator = super().__iter__()
            if self.num_workers:
                _end_workers_at_exit()
                _ITERATORS.add(iterator)
                _WORKERS.update(existing(iterator, "_workers"))
            return iterator
        whole_batches: Any = self.dataset
        batches = iter(cast(BatchSampler, self.batch_sampler))
        if whole_batches.collate is None and can_be_prefetched(whole_batches.dataset):
            return prefetch(whole_batches.__getitems__, batches)
        return map(whole_batches.__getitems__, batches)


def _identity(batch: T) -> T:
    return batch


@functools.cache
def _end_workers_at_exit() -> None:
    # After torch and multiprocessing have registered theirs: the last function runs first.
    atexit.register(_end_workers)


def _end_workers() -> None:
    """Ends all workers when Python exits.

    Otherwise Python sends the workers SIGTERM, which they ignore, and waits for them without end.
    A program that ends by `os._exit` or a signal leaves its workers to the kernel, see
    `_begin_worker`.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for a killed worker
    for iterator in list(_ITERATORS):
        existing(iterator, "_shutdown_workers")()  # torch calls this to delete an iterator
    for worker in list(_WORKERS):
        if worker.is_alive():  # it hangs
            worker.kill()


def _begin_worker(begin: Callable[[int], Any] | None, worker: int) -> None:
    # A terminal, `scancel` or systemd signals all processes of a job. The training process handles
    # the signal, and needs batches until it has completed its step and its validation.
    ignore_signals()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid == os.getppid():  # not with the method `forkserver`
        die_with_parent(os.getppid())
    exit_on_failed_send()
    if begin is not None:
        begin(worker)


def make_loader(
    template: DataLoader, sampler: BatchSampler, mark_padding: bool = False
) -> DataLoader:
    """Builds a loader for the template's dataset, in the sampler's order.

    Batches come from the dataset's `get_batch`. Without `get_batch`, samples are collated. If the
    template has its own `collate_fn`, samples are collated by it.

    Args:
        template: A torch DataLoader that defines the dataset, the workers and the collation.
        sampler: Yields the indices of each batch.
        mark_padding: Whether to add `batch["loss_mask"]`, float32 (batch,). The mask is 0 for
            padding. For samples it is padded length divided by number of samples, so that the mask
            averages 1 over all batches. Means of `mask * loss` over micro batches, ranks and steps
            are then the mean over samples, under every layout. If the dataset returns a
            `loss_mask`, (batch, ...), the two masks are multiplied.

    Raises:
        UserError: The workers' batches do not fit into shared memory.
    """
    weight = sampler.end / sampler.num_samples if mark_padding else None
    is_default = template.collate_fn in (default_collate, default_convert)
    collate = None if is_default else template.collate_fn
    whole_batches = _WholeBatches(template.dataset, weight, collate)
    options: dict[str, Any] = {
        "batch_sampler": sampler,
        "collate_fn": _identity,
        # For the workers' seeds. Without it, torch draws them from the global generator, which
        # dropout uses, too.
        "generator": template.generator or torch.Generator(),
    }
    if template.num_workers:
        options["worker_init_fn"] = functools.partial(_begin_worker, template.worker_init_fn)
        options["timeout"] = template.timeout or WORKER_TIMEOUT
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            options[name] = getattr(template, name)
    for name in ("num_workers", "pin_memory"):
        options[name] = getattr(template, name)
    loader = _Loader(whole_batches, **options)
    # The size of one batch shows whether shared memory suffices, before the workers need it.
    for indices in itertools.islice(sampler, loader.num_workers and 1):
        check_shared_memory(loader, whole_batches.__getitems__(indices))
    return loader
