"""Megatron's checkpoint writer without helper processes.

Megatron starts one process by 'spawn' to hold a queue, which imports the main script again (seconds
in the first save), and forks two more for every save. If a run is killed in the meantime they live
on: the first for ever, the others while they still write into a folder that the next start is
cleaning up. Our strategy saves synchronously, so the queue can be an ordinary one and the writers
can be threads: the bytes they write are the same, and nothing outlives the run. Asynchronous saves
need Megatron's own, which is why `build_strategy` applies this, and not `use_accelerator`.
"""

import functools
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megakit.runtime.patching import replace


def results_queue_is_an_ordinary_one() -> None:
    """Instead of a queue in a process of its own."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue[Any] = queue.Queue()
    replace(filesystem_async, "_get_write_results_queue", lambda: results)


def writers_are_threads() -> None:
    """Instead of forked processes. Writing to files and hashing do not hold Python's lock."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer = filesystem_async.FileSystemWriterAsync

    def write(
        transforms: list[Any],
        use_msc: bool,
        rank: int,
        write_buckets: list[Any],
        global_results_queue: Any,
    ) -> None:
        answers: queue.Queue[Any] = queue.Queue()
        running: queue.Queue[Any] = queue.Queue()  # each writer takes its number off when done

        def write_one(number: int) -> None:
            running.put(number)
            writer.write_preloaded_data(
                transforms, number, write_buckets[number], answers, running, True, use_msc=use_msc
            )

        with ThreadPoolExecutor(max_workers=max(1, len(write_buckets))) as threads:
            for done in [threads.submit(write_one, k) for k in range(len(write_buckets))]:
                done.result()
        results: Any = {}
        for number, written in sorted((answers.get() for _ in write_buckets), key=lambda a: a[0]):
            if isinstance(written, Exception):
                results = written
                break
            results[number] = written
        global_results_queue.put(results)

    replace(writer, "write_preloaded_data_multiproc", staticmethod(write))


PATCHES: tuple[Callable[[], None], ...] = (results_queue_is_an_ordinary_one, writers_are_threads)


@functools.cache
def write_within_this_process() -> None:
    """Applies the patches, once; imports Megatron."""
    for patch in PATCHES:
        patch()
