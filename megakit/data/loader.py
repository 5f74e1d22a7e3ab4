"""From indices to batches, in as few operations as the dataset allows."""

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
from megakit.runtime.shared_memory import check_room, end_if_it_cannot_hand_over
from megakit.runtime.signals import ignore_signals

#: Seconds without a batch after which workers count as hung, unless the template has a timeout.
PATIENCE = 600


class BatchSampler(Protocol):
    """Yields arrays of indices of one size; negative ones are padding."""

    num_samples: int
    end: int

    def __iter__(self) -> Iterator[NDArray[np.int64]]: ...

    def __len__(self) -> int: ...


class _WholeBatches(Dataset[Any]):
    """Gives torch's loader finished batches: it asks for a list, and collates nothing after."""

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
        # Padding repeats sample 0: any real one will do, since its weight is nought.
        batch = self._fetch(np.where(is_sample, indices, 0))
        if not isinstance(batch, dict):
            raise TypeError(
                f"an evaluation batch is a {type(batch).__name__}; it has to be a dict, so "
                "that batch['loss_mask'] can mark padding. Return dicts from __getitem__."
            )
        weights = torch.from_numpy(is_sample * np.float32(self.padding_weight))
        if "loss_mask" in batch:  # the dataset's own, of one weight per token, say
            mask = batch["loss_mask"]
            weights = mask * weights.view(-1, *[1] * (mask.dim() - 1))
        return {**batch, "loss_mask": weights}

    def _fetch(self, indices: NDArray[np.int64]) -> Any:
        if self.collate is None:
            return fetch_batch(self.dataset, indices)
        return self.collate(fetch_samples(self.dataset, indices))


#: Those that were made: each is to be registered once.
_ITERATORS: weakref.WeakSet[Any] = weakref.WeakSet()


class _Loader(DataLoader):
    """Skips torch's iterator, which takes as long as a batch, where there are no workers."""

    def __iter__(self) -> Any:
        if self.num_workers or self.pin_memory:
            iterator = super().__iter__()
            if iterator not in _ITERATORS:  # persistent workers keep theirs
                _ITERATORS.add(iterator)
                atexit.register(_end_workers, weakref.ref(iterator))
            return iterator
        whole_batches: Any = self.dataset
        batch_sampler: Any = self.batch_sampler
        return map(whole_batches.__getitems__, batch_sampler)


def _as_it_is(batch: Any) -> Any:
    return batch


def _end_workers(reference: weakref.ref[Any]) -> None:
    """Ends the workers of an iterator that is left at the exit of the program.

    Python would send them SIGTERM, which they ignore, and wait for them for ever.
    """
    if (iterator := reference()) is not None:
        iterator._shutdown_workers()  # as torch does where an iterator is dropped


def _begin_worker(begin: Callable[[int], Any] | None, worker: int) -> None:
    # A terminal, `scancel` or systemd signals all processes of a job. The training process answers,
    # and needs batches until its step and its validation are done.
    ignore_signals()
    end_if_it_cannot_hand_over()
    if begin is not None:
        begin(worker)


def make_loader(
    template: DataLoader, sampler: BatchSampler, mark_padding: bool = False
) -> DataLoader:
    """A loader over the template's dataset, in the sampler's order.

    A batch comes from the dataset's `get_batch` where it has one, else samples are collated; a
    `collate_fn` of the template's own is used as it is.

    Args:
        template: A torch DataLoader with its dataset, workers and collation.
        sampler: Which indices each batch holds.
        mark_padding: Whether to add `batch["loss_mask"]`, float32 (batch,): 0 for padding, and for
            each sample the number of slots, padding included, over the number of samples. Its mean
            over all batches is 1, so that plain means of `mask * loss` over micro batches, ranks
            and steps come out as the mean over samples, whatever the layout. A `loss_mask` that
            the dataset gives, (batch, ...), is multiplied by it.

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
        # torch draws the workers' seeds from it, else from the generator that dropout uses, too.
        generator=template.generator or torch.Generator(),
        **workers,
    )
    # One batch tells how much the workers will need, before they wait for what is not there.
    for indices in itertools.islice(sampler, loader.num_workers and 1):
        check_room(loader, whole_batches.__getitems__(indices))
    return loader
