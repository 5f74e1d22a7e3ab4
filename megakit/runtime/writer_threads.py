"""Patches Megatron's checkpoint writer to work without helper processes.

Megatron spawns a process for a queue, which imports the main script again: seconds in the first
save. For every save, Megatron also forks two writer processes, which may still write into a folder
of a killed run while the next start cleans it up.

Our strategy saves synchronously, so a queue and threads of this process are sufficient. The threads
write the same bytes, as fast, and end with the run. Asynchronous saves need Megatron's processes,
so `ExactStrategy` and `train` apply these patches, and `use_accelerator` does not.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

from megakit.runtime.patching import patch


@functools.cache
def write_in_threads() -> None:
    """Replaces Megatron's queue and writer processes, once; imports Megatron."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer = filesystem_async.FileSystemWriterAsync
    results_of_writers: Queue[Any] = Queue()

    def write(transforms: list[Any], use_msc: bool, rank: int, buckets: Any, results: Any) -> None:
        answers: Queue[Any] = Queue()
        running: Queue[Any] = Queue()  # each writer removes one number when done

        def write_one(number: int) -> None:
            running.put(number)
            writer.write_preloaded_data(
                transforms, number, buckets[number], answers, running, True, use_msc=use_msc
            )

        with ThreadPoolExecutor() as threads:
            list(threads.map(write_one, range(len(buckets))))  # raises a thread's error
        by_number = dict(sorted((answers.get() for _ in buckets), key=lambda pair: pair[0]))
        # If the disk is full, torch's archive fails again when it is closed, without the reason.
        errors = (e.__context__ or e for e in by_number.values() if isinstance(e, Exception))
        results.put(next(errors, by_number))

    names = ("_get_write_results_queue", "write_preloaded_data_multiproc")
    if not hasattr(filesystem_async, names[0]):  # megatron-core 0.19, whose threads hide the error
        names = ("get_write_results_queue", "write_preloaded_data_multithread")
    replacements = (filesystem_async, lambda: results_of_writers), (writer, staticmethod(write))
    for name, (owner, function) in zip(names, replacements, strict=True):
        patch(
            owner,
            name,
            function,
            group="safe",
            reason="processes that write may outlive a killed run, and write while it resumes",
        )
