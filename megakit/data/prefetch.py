"""Prefetches batches in a thread, several with one call."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from megakit.data.batches import has_get_batch
from megakit.data.indices import IntArray

#: Limits of a chunk, the batches that one call fetches: together they share the cost of the call.
CHUNK_BYTES = 4 << 20
GPU_CHUNK_BYTES = 64 << 20  # each copy to a GPU and each kernel has a price
CHUNK_BATCHES = 16


def prefetch(
    fetch: Callable[[IntArray], Any], batches: Iterator[IntArray], chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Any]:
    """Fetches a chunk of batches in a thread while the previous chunk is used.

    numpy and torch release Python's lock while they compute, so the thread runs beside the model.

    Args:
        fetch: Returns the batch of an array of indices. A row of the batch must depend on its own
            index only, as `get_batch` promises, since one call fetches several batches.
        batches: Arrays of indices, int64 (batch,), all of the same size.
        chunk_bytes: Size of a chunk. The first batch is fetched alone, as its size decides how many
            batches make a chunk.

    Yields:
        The batch of each array: views of the chunk's tensors. Batches that are not a dict of
        tensors are fetched one by one.
    """
    if (indices := next(batches, None)) is None:
        return
    first, rows = fetch(indices), len(indices)
    yield first
    if not _can_be_cut(first, rows):
        yield from map(fetch, batches)
        return
    size = sum(tensor.nbytes for tensor in first.values())
    count = max(1, min(CHUNK_BATCHES, chunk_bytes // max(size, 1)))

    def fetch_chunk() -> list[Any]:
        chunk = list(itertools.islice(batches, count))
        if not chunk:
            return []
        whole = fetch(np.concatenate(chunk))
        cuts = [slice(k * rows, (k + 1) * rows) for k in range(len(chunk))]
        return [{name: tensor[cut] for name, tensor in whole.items()} for cut in cuts]

    # One core for the data; the others are the model's. torch keeps the number for each thread.
    with ThreadPoolExecutor(1, "prefetch", torch.set_num_threads, (1,)) as thread:
        ahead = thread.submit(fetch_chunk)
        while chunk := ahead.result():
            ahead = thread.submit(fetch_chunk)
            yield from chunk


def can_be_prefetched(dataset: Any) -> bool:
    """Tells whether a dataset and all datasets inside it return whole batches.

    Other datasets may own something that belongs to one thread, such as a database connection.
    """
    if type(dataset) is not Subset and not has_get_batch(type(dataset)):
        return False
    inner = [dataset.dataset] if hasattr(dataset, "dataset") else getattr(dataset, "datasets", [])
    return all(map(can_be_prefetched, inner))


def _can_be_cut(batch: Any, rows: int) -> bool:
    """Tells whether a batch is a dict of tensors that have one row for each sample."""
    return type(batch) is dict and all(
        isinstance(tensor, torch.Tensor) and tensor.dim() and len(tensor) == rows
        for tensor in batch.values()
    )
