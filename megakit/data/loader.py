"""Builds data loaders of whole batches, with `loss_mask` 0 for padding that `sampler.py` places."""

import atexit
import faulthandler
import functools
import signal
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert

from megakit.data.batches import fetch_batch, fetch_samples
from megakit.data.device import CPU, batches_on, copied, gpu_lock
from megakit.data.indices import IntArray
from megakit.data.prefetch import CHUNK_BYTES, GPU_CHUNK_BYTES, can_be_prefetched, prefetch
from megakit.runtime.patching import require_attribute
from megakit.runtime.signals import ignore_signals, stop_signals_blocked

T = TypeVar("T")

#: Seconds to wait for a batch of the workers, unless the template has a timeout.
WORKER_TIMEOUT = 600


def make_loader(
    template: DataLoader,
    sampler: Any,
    padding_weight: float | None = None,
    device: torch.device = CPU,
) -> DataLoader:
    """Builds a loader for the template's dataset, in the sampler's order.

    Batches come from `fetch_batch`. If the template has its own `collate_fn`, samples are collated
    by it.

    Args:
        template: A torch DataLoader that defines the dataset, the workers and the collation.
        sampler: Yields the indices of each batch, int64 (batch,), all of the same size; negative
            indices are padding.
        padding_weight: If given, each batch gets a `loss_mask`, float32 (batch,): this weight for
            samples, 0 for padding. If the dataset returns a `loss_mask`, (batch, ...), the two
            masks are multiplied.
        device: Where the batches are needed; the copies to a GPU do not wait for it.
    """
    is_default = template.collate_fn in (default_collate, default_convert)
    batches = _Batches(
        template.dataset, None if is_default else template.collate_fn, padding_weight
    )
    kept = ("num_workers", "prefetch_factor", "persistent_workers")
    loader = _Loader(
        batches,
        batch_size=None,
        sampler=sampler,
        collate_fn=_identity,
        # For the workers' seeds. Without it, torch draws them from the global generator, which
        # dropout uses, too.
        generator=template.generator or torch.Generator(),
        worker_init_fn=functools.partial(_begin_worker, template.worker_init_fn),
        timeout=(template.timeout or WORKER_TIMEOUT) if template.num_workers else 0,
        multiprocessing_context=template.multiprocessing_context,
        # By a thread of torch, beside the training, before `copied` copies the workers' batches.
        pin_memory=template.pin_memory or device.type == "cuda",
        **{name: getattr(template, name) for name in kept},
    )
    loader.device = device
    return loader


class _Batches(Dataset[Any]):
    """The batches of a dataset: an array of indices gives the collated batch."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None, padding_weight: float | None
    ) -> None:
        self.dataset, self.collate, self.padding_weight = dataset, collate, padding_weight

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: IntArray) -> Any:
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
            weights = mask * weights.view(-1, *[1] * (mask.dim() - 1)).to(mask.device)
        return {**batch, "loss_mask": weights}


class _Loader(DataLoader):
    """Prefetches in a thread without workers; torch's own iterator takes as long as a batch.

    Attributes:
        device: Where the batches are needed.
    """

    device = CPU

    def __iter__(self) -> Any:
        if self.num_workers:
            with stop_signals_blocked():
                iterator = super().__iter__()
            atexit.register(_kill, require_attribute(iterator, "_workers"))
            return (copied(batch, self.device) for batch in iterator)
        batches = cast(_Batches, self.dataset)
        order, fetch = iter(self.sampler), _fetcher(batches, self.device)
        if batches.collate is not None or not can_be_prefetched(batches.dataset):
            return map(fetch, order)
        return prefetch(fetch, order, CHUNK_BYTES if self.device == CPU else GPU_CHUNK_BYTES)


def _fetcher(batches: _Batches, device: torch.device) -> Callable[[IntArray], Any]:
    """Returns a function that fetches a batch and copies it to the device, from any thread."""
    if device == CPU:
        return batches.__getitem__
    # Each thread has its own current GPU and stream. A prefetching thread would begin with GPU 0,
    # and with a stream that the training thread does not wait for.
    stream = torch.cuda.current_stream(device)

    def fetch(indices: IntArray) -> Any:
        with gpu_lock, torch.cuda.device(device), torch.cuda.stream(stream), batches_on(device):
            return copied(batches[indices], device)

    return fetch


def _identity(batch: T) -> T:
    return batch


def _begin_worker(begin: Callable[[int], Any] | None, worker: int) -> None:
    # A terminal, `scancel` or systemd signals all processes of a job. The training process handles
    # the signal, and needs batches until it has completed its step and its validation.
    ignore_signals()
    faulthandler.disable()  # its report of an abort is the training process's
    if begin is not None:
        begin(worker)


def _kill(workers: list[Any]) -> None:
    """Kills the workers, which ignore the signal by which Python would end them at its exit."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for a killed worker
    for worker in workers:
        if worker.is_alive():
            worker.kill()
