"""Builds data loaders that fetch whole batches and mark padding."""

import atexit
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert

from megakit.data.batches import fetch_batch, fetch_samples
from megakit.runtime.shared_memory import check_shared_memory, exit_on_failed_send
from megakit.runtime.signals import ignore_signals

#: Seconds to wait for a batch of the workers, unless the template has a timeout.
PATIENCE = 600


class BatchSampler(Protocol):
    """Yields arrays of indices, all of the same size; negative indices are padding."""

    num_samples: int
    end: int

    def __iter__(self) -> Iterator[NDArray[np.int64]]: ...

    def __len__(self) -> int: ...


class _WholeBatches(Dataset[Any]):
    """Wraps a dataset so that `__getitems__` returns a collated batch instead of a list."""

    def __init__(self, dataset: Any, padding_weight: float | None, collate: Any = None) -> None:
        self.dataset = dataset
        self.padding_weight = padding_weight
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: NDArray[np.int64]) -> Any:
        if self.padding_weight is None:
            return self._fetch(indices)
        is_sample = indices >= 0
        # Padding repeats sample 0. Any sample is possible here, as the weight of padding is 0.
        batch = self._fetch(np.where(is_sample, indices, 0))
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

    def _fetch(self, indices: NDArray[np.int64]) -> Any:
        if self.collate is None:
            return fetch_batch(self.dataset, indices)
        return self.collate(fetch_samples(self.dataset, indices))


#: Iterators whose workers are already registered to be ended at exit.
_ITERATORS: weakref.WeakSet[Any] = weakref.WeakSet()


class _Loader(DataLoader):
    """Skips torch's iterator if there are no workers, as it takes as long as a batch."""

    def __iter__(self) -> Any:
        if self.num_workers or self.pin_memory:
            iterator = super().__iter__()
            if iterator not in _ITERATORS:  # persistent workers have the same iterator again
                _ITERATORS.add(iterator)
                atexit.register(_end_workers, weakref.ref(iterator))
            return iterator
        whole_batches: Any = self.dataset
        batch_sampler: Any = self.batch_sampler
        return map(whole_batches.__getitems__, batch_sampler)


def _as_it_is(batch: Any) -> Any:
    return batch


def _end_workers(reference: weakref.ref[Any]) -> None:
    """Ends an iterator's workers when the program exits.

    Otherwise Python sends the workers SIGTERM, which they ignore, and waits for them without end.
    """
    if (iterator := reference()) is not None:
        iterator._shutdown_workers()  # torch calls this when an iterator is deleted


def _begin_worker(begin: Callable[[int], Any] | None, worker: int) -> None:
    # A terminal, `scancel` or systemd signals all processes of a job. The training process handles
    # the signal, and needs batches until it has completed its step and its validation.
    ignore_signals()
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
    is_torchs = template.collate_fn in (default_collate, default_convert)
    collate = None if is_torchs else template.collate_fn
    whole_batches = _WholeBatches(template.dataset, weight, collate)
    workers: dict[str, Any] = {}
    if template.num_workers:
        workers = {
            "prefetch_factor": template.prefetch_factor,
            "persistent_workers": template.persistent_workers,
            "worker_init_fn": functools.partial(_begin_worker, template.worker_init_fn),
            "multiprocessing_context": template.multiprocessing_context,
            "timeout": template.timeout or PATIENCE,
        }
    batches: Any = sampler
    loader = _Loader(
        whole_batches,
        batch_sampler=batches,
        collate_fn=_as_it_is,
        num_workers=template.num_workers,
        pin_memory=template.pin_memory,
        # For the workers' seeds. Without it, torch draws them from the global generator, which
        # dropout uses, too.
        generator=template.generator or torch.Generator(),
        **workers,
    )
    # The size of one batch shows whether shared memory suffices, before the workers need it.
    for indices in itertools.islice(sampler, loader.num_workers and 1):
        check_shared_memory(loader, whole_batches.__getitems__(indices))
    return loader
