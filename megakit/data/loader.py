"""From indices to batches, in as few operations as the dataset allows."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert

from megakit.data.ahead import can_be_fetched_ahead, fetch_ahead
from megakit.data.batches import fetch_batch, fetch_samples


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


class _Loader(DataLoader):
    """torch's, but for the machinery around a single process, which costs as much as a batch."""

    def __iter__(self) -> Any:
        if self.num_workers or self.pin_memory:
            return super().__iter__()
        whole_batches: Any = self.dataset
        batch_sampler: Any = self.batch_sampler
        fetch, batches = whole_batches.__getitems__, iter(batch_sampler)
        if whole_batches.collate is None and can_be_fetched_ahead(whole_batches.dataset):
            return fetch_ahead(fetch, batches)
        return map(fetch, batches)


def _as_it_is(batch: Any) -> Any:
    return batch


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
    """
    weight = sampler.end / sampler.num_samples if mark_padding else None
    is_torchs = template.collate_fn in (default_collate, default_convert)
    workers: dict[str, Any] = {}
    if template.num_workers:
        workers = {
            "prefetch_factor": template.prefetch_factor,
            "persistent_workers": template.persistent_workers,
            "worker_init_fn": template.worker_init_fn,
            "multiprocessing_context": template.multiprocessing_context,
            "timeout": template.timeout,
        }
    batches: Any = sampler
    return _Loader(
        _WholeBatches(template.dataset, weight, None if is_torchs else template.collate_fn),
        batch_sampler=batches,
        collate_fn=_as_it_is,
        num_workers=template.num_workers,
        pin_memory=template.pin_memory,
        # torch draws the workers' seeds from it, else from the generator that dropout uses, too.
        generator=template.generator or torch.Generator(),
        **workers,
    )
