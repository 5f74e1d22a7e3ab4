"""Patches Megatron's checkpoint writer to work without helper processes.

Megatron spawns a process for a queue, which imports the main script again: seconds in the first
save. For every save, Megatron also forks two writer processes. If the run is killed, the queue
process remains, and the writers may write into a folder while the next start cleans it up.

Our strategy saves synchronously, so a queue and threads of this process are sufficient. The threads
write the same bytes, and end with the run. Asynchronous saves need Megatron's processes, so
`build_strategy` applies these patches, and `use_accelerator` does not.
"""

import functools
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megakit.runtime.patching import replace


@functools.cache
def write_in_threads() -> None:
    """Replaces Megatron's queue and writer processes, once; imports Megatron.

    Writing to files releases Python's global interpreter lock, so threads are as fast.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer = filesystem_async.FileSystemWriterAsync
    results_of_writers: queue.Queue[Any] = queue.Queue()

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
            list(threads.map(write_one, range(len(write_buckets))))  # raises a thread's error
        results = dict(sorted((answers.get() for _ in write_buckets), key=lambda pair: pair[0]))
        errors = (one for one in results.values() if isinstance(one, Exception))
        global_results_queue.put(next(errors, results))

    replace(filesystem_async, "_get_write_results_queue", lambda: results_of_writers)
    replace(writer, "write_preloaded_data_multiproc", staticmethod(write))
