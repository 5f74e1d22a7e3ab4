"""How many threads an operation may use, decided before torch is imported."""

import os

#: Layers below this width are done before a second thread has begun.
WORTH_SHARING = 512


def limit_threads(width: int) -> None:
    """Has a narrow model compute in one thread, unless `OMP_NUM_THREADS` says otherwise.

    More would take processor time for nothing, and where other processes share the cores they wait
    for each other at every operation, which makes a step ten times as long. The environment is the
    place: Lightning undoes `torch.set_num_threads`.

    Args:
        width: Of the model's layers.
    """
    if width < WORTH_SHARING:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
