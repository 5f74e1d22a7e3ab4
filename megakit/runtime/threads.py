"""Sets the number of threads per operation, before torch is imported."""

import os

#: Multiplications of a matrix product that occupy a thread, by measurement. With less work, a
#: second thread occupies a core for more time than it saves.
WORK_OF_A_THREAD = 2**23


def limit_threads(work: int, processes: int | None = 1) -> None:
    """Sets `OMP_NUM_THREADS` by the work of an operation, unless the variable is set.

    A thread with little work finishes before another has started. The processes of a job share the
    cores of their machine. This function sets an environment variable, because Lightning overrides
    `torch.set_num_threads`.

    Args:
        work: Multiplications of a matrix product of the model: tokens of a micro batch x width x
            width.
        processes: Processes of the job on this machine; None if srun assigns cores to processes.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    threads = work // WORK_OF_A_THREAD
    if processes is not None:
        threads = min(threads, len(os.sched_getaffinity(0)) // max(1, processes))
    elif threads > 1:
        return  # by srun's --cpus-per-task: see `share_plan`
    os.environ["OMP_NUM_THREADS"] = str(max(1, threads))
    # By default, a waiting thread occupies its core. If another program uses the core, too, an
    # operation then takes up to a hundred times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
