"""Patches Megatron's checkpoint writer to work without helper processes.

Megatron spawns one process that holds a queue. This process imports the main script again, which
takes seconds in the first save. For every save, Megatron also forks two writer processes. If the
run is killed, the queue process remains forever. The writer processes may still write into a folder
while the next start cleans up the folder.

Our strategy saves synchronously, so an ordinary queue and writer threads are sufficient. The
threads write the same bytes, and end with the run. Asynchronous saves need Megatron's processes, so
`build_strategy` applies these patches, and `use_accelerator` does not.
"""

import functools
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megakit.runtime.patching import replace


def results_queue_is_an_ordinary_one() -> None:
    """Replaces Megatron's queue, which is in a separate process, with a queue in this process."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue[Any] = queue.Queue()
    replace(filesystem_async, "_get_write_results_queue", lambda: results)


def writers_are_threads() -> None:
    """Replaces Megatron's forked writer processes with threads.

    Writing to files and hashing do not hold Python's global interpreter lock.
    """
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
        running: queue.Queue[Any] = queue.Queue()  # each writer removes one number when done

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
