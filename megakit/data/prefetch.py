"""Batches fetched ahead of their use, several at once, in a thread."""

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

from megakit.data.batches import is_current

#: What is fetched at once, if it is several batches: enough to spread the cost of a call.
CHUNK_BYTES = 4 << 20
CHUNK_BATCHES = 16
#: Who uses a chunk for longer gains by a thread, which takes some tenths of a millisecond to wake.
BUSY_SECONDS = 0.0005

Batches = Iterator[NDArray[np.int64]]


def prefetch(fetch: Callable[[NDArray[np.int64]], Any], batches: Batches) -> Iterator[Any]:
    """Fetch batches several at once, in a thread if their user is busy for long enough.

    While one chunk of them is being used, the thread fetches the next: torch and numpy let other
    threads run while they compute. Who only reads is served without one, and sooner.
    The first batch is fetched alone: it tells how many make a chunk, and comes without delay.

    Args:
        fetch: Gives the batch of an array of indices. It is called with those of several batches,
            so a row of what it gives may depend on its own index only, as `get_batch` promises.
        batches: Arrays of indices, all of one length.

    Yields:
        For each array its batch; a view of its chunk.
    """
    if (first := next(batches, None)) is None:
        return
    batch = fetch(first)
    rows, size = len(first), _bytes_of(batch, len(first))
    yield batch
    if not size:
        yield from map(fetch, batches)
        return
    count = max(1, min(CHUNK_BATCHES, CHUNK_BYTES // size))

    def fetch_chunk() -> list[Any]:
        chunk = list(itertools.islice(batches, count))
        if not chunk:
            return []
        whole = fetch(np.concatenate(chunk))
        return [_rows_of(whole, slice(k * rows, (k + 1) * rows)) for k in range(len(chunk))]

    # One core is enough for it: the others are the model's. torch's setting is each thread's own.
    with ThreadPoolExecutor(1, "data", torch.set_num_threads, (1,)) as thread:
        chunk, is_busy = fetch_chunk(), False
        while chunk:
            future = thread.submit(fetch_chunk) if is_busy else None
            began = time.perf_counter()
            yield from chunk
            is_busy = time.perf_counter() - began > BUSY_SECONDS
            chunk = future.result() if future else fetch_chunk()


def can_be_prefetched(dataset: Any) -> bool:
    """Whether a dataset gives whole batches, and so does all that it wraps.

    Other datasets may hold what is bound to its thread, such as a database's connection.
    """
    if type(dataset) is not Subset and not is_current(type(dataset), "get_batch", "__getitem__"):
        return False
    return not hasattr(dataset, "dataset") or can_be_prefetched(dataset.dataset)


def _bytes_of(batch: Any, rows: int) -> int:
    """The size of a batch; 0 if it is not made of tensors with so many rows alone."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes if batch.dim() and len(batch) == rows else 0
    if type(batch) not in (dict, list):  # what collation makes: others are handed on as they are
        return 0
    parts = batch.values() if isinstance(batch, dict) else batch
    sizes = [_bytes_of(part, rows) for part in parts]
    return sum(sizes) if all(sizes) else 0


def _rows_of(batch: Any, rows: slice) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[rows]
    if isinstance(batch, dict):
        return {key: _rows_of(part, rows) for key, part in batch.items()}
    return [_rows_of(part, rows) for part in batch]
