"""Builds data loaders that fetch whole batches and mark padding."""

import atexit
import faulthandler
import functools
import multiprocessing
import os
import signal
import traceback
import weakref
from collections.abc import Callable, Iterator, Sized
from multiprocessing.queues import Queue
from typing import Any, NoReturn, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert

from megakit.data.batches import fetch_batch, fetch_samples
from megakit.data.device import batches_on, copied, on_device
from megakit.data.prefetch import CHUNK_BYTES, GPU_CHUNK_BYTES, can_be_prefetched, prefetch
from megakit.runtime.patching import patch, require_attribute
from megakit.runtime.signals import die_with_parent, ignore_signals, stop_signals_blocked

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
        self.device: torch.device | None = None

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitems__(self, indices: NDArray[np.int64]) -> Any:
        if self.device is None:
            return self._compute(indices)
        with batches_on(self.device):
            try:
                return self._compute(indices)
            except (RuntimeError, TypeError) as error:
                if any(part in str(error) for part in ("same device", "device type")):
                    error.add_note(
                        "The data module has computes_on_device=True, so batches are computed on "
                        f"{self.device}. Pass each array through megakit.data.on_device instead of "
                        "torch.from_numpy, or set computes_on_device=False."
                    )
                raise

    def _compute(self, indices: NDArray[np.int64]) -> Any:
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
        weights = on_device(is_sample * np.float32(self.padding_weight))
        if "loss_mask" in batch:  # from the dataset, for example with one weight per token
            mask = batch["loss_mask"]
            weights = mask * weights.view(-1, *[1] * (mask.dim() - 1))
        return {**batch, "loss_mask": weights}


#: Iterators with workers, and the workers' processes, which outlive an iterator if they hang.
_ITERATORS: weakref.WeakSet[Any] = weakref.WeakSet()
_WORKERS: weakref.WeakSet[Any] = weakref.WeakSet()


class _Loader(DataLoader):
    """Skips torch's iterator if there are no workers, as it takes as long as a batch.

    Attributes:
        device: Where the batches are needed.
    """

    device = torch.device("cpu")

    def __iter__(self) -> Any:
        is_on_gpu = self.device.type != "cpu"
        if self.num_workers:
            self.pin_memory = self.pin_memory or is_on_gpu
            with stop_signals_blocked():
                iterator = super().__iter__()
            _end_workers_at_exit()
            _ITERATORS.add(iterator)
            _WORKERS.update(require_attribute(iterator, "_workers"))
            return (copied(batch, self.device) for batch in iterator) if is_on_gpu else iterator
        whole_batches: Any = self.dataset
        batches = iter(cast(BatchSampler, self.batch_sampler))
        fetch = whole_batches.__getitems__
        if is_on_gpu:
            fetch = _then_copied(fetch, self.device)
        elif self.pin_memory:
            return super().__iter__()
        if whole_batches.collate is None and can_be_prefetched(whole_batches.dataset):
            return prefetch(fetch, batches, GPU_CHUNK_BYTES if is_on_gpu else CHUNK_BYTES)
        return map(fetch, batches)


def _then_copied(fetch: Callable[[Any], Any], device: torch.device) -> Callable[[Any], Any]:
    """Makes `fetch` return its batch on a GPU, from any thread.

    Each thread has its own current GPU and stream. A prefetching thread would begin with GPU 0, and
    with a stream that the training thread does not wait for.
    """
    stream = torch.cuda.current_stream(device)

    def fetch_and_copy(indices: Any) -> Any:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return copied(fetch(indices), device)

    return fetch_and_copy


def load_on(loader: DataLoader, device: torch.device, computes_there: bool) -> DataLoader:
    """Makes a loader of `make_loader` yield batches on the trainer's device; returns the loader.

    Args:
        loader: Another loader is returned unchanged.
        device: The device; the copies to a GPU do not wait for it.
        computes_there: Whether the dataset computes its batches on the device, by `on_device`.
            Workers compute on the CPU, because a forked process cannot use its parent's GPU.
    """
    if isinstance(loader, _Loader):
        loader.device = device
        if computes_there and not loader.num_workers:
            cast(_WholeBatches, loader.dataset).device = device
    return loader


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
        require_attribute(iterator, "_shutdown_workers")()  # torch calls this to delete an iterator
    for worker in list(_WORKERS):
        if worker.is_alive():  # it hangs
            worker.kill()


def _begin_worker(begin: Callable[[int], Any] | None, has_fork_server: bool, worker: int) -> None:
    # A terminal, `scancel` or systemd signals all processes of a job. The training process handles
    # the signal, and needs batches until it has completed its step and its validation.
    ignore_signals()
    faulthandler.disable()  # its report of an abort is the training process's
    training_process = multiprocessing.parent_process()
    if training_process is not None and not has_fork_server:
        # If it has ended by now, torch's worker would watch the process that adopted it, for ever.
        die_with_parent(cast(int, training_process.pid))
    # By default, a batch that does not fit into shared memory is dropped, and training waits.
    patch(Queue, "_on_queue_feeder_error", staticmethod(_exit_on_failed_send))
    if begin is not None:
        begin(worker)


def _exit_on_failed_send(error: BaseException, batch: object) -> NoReturn:
    traceback.print_exception(error)
    os._exit(1)


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
        context: Any = template.multiprocessing_context or multiprocessing
        options["worker_init_fn"] = functools.partial(
            _begin_worker, template.worker_init_fn, context.get_start_method() == "forkserver"
        )
        options["timeout"] = template.timeout or WORKER_TIMEOUT
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            options[name] = getattr(template, name)
    for name in ("num_workers", "pin_memory"):
        options[name] = getattr(template, name)
    return _Loader(whole_batches, **options)
