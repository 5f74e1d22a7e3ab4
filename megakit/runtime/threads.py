"""Limits the number of threads per operation, before torch is imported."""

import os

#: A narrower layer finishes before a second thread has started.
MIN_WIDTH_FOR_THREADS = 512


def limit_threads(width: int) -> None:
    """Makes a narrow model compute in one thread, unless `OMP_NUM_THREADS` is set.

    More threads would waste processor time. If other processes share the cores, threads wait for
    each other at every operation, which makes a step ten times as long. This function sets
    `OMP_NUM_THREADS`, because Lightning overrides `torch.set_num_threads`.

    Args:
        width: Width of the model's layers.
    """
    if width < MIN_WIDTH_FOR_THREADS:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
