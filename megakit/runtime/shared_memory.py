"""Checks shared memory for batches of data loader workers, and explains why a worker ended."""

import os
import re
import signal
import traceback
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from megakit.errors import UserError
from megakit.runtime.patching import replace

FOLDER = Path("/dev/shm")  # where Linux's shm_open puts its files
#: Exit status of a worker that cannot send a batch to the main process.
SEND_FAILED = 74
_PAGE = 4096
_REMEDY = (
    "Use a smaller --micro-batch-size, fewer --num-workers (0 needs no shared memory), or more "
    "shared memory (docker run --shm-size)."
)


#: Bytes of shared memory that each loader's workers may use, and free bytes before the first check.
_needs: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_free_at_first = 0


def check_shared_memory(loader: Any, batch: Any) -> None:
    """Raises an error if the batches of data loader workers do not fit into shared memory.

    The workers of all loaders count, since training workers keep their batches during validation.

    Args:
        loader: A torch DataLoader whose workers have not started yet.
        batch: One batch, as a worker sends it.

    Raises:
        UserError: /dev/shm is too small for the ranks of this machine.
    """
    global _free_at_first
    try:
        status = os.statvfs(FOLDER)
    except OSError:  # no such folder: torch then shares memory in another way
        return
    if not _needs:
        _free_at_first = status.f_bavail * status.f_frsize
    # Two more batches: the batch in use, and the batch that the main process has just received.
    num_batches = loader.num_workers * loader.prefetch_factor + 2
    # Every rank loads data. The launchers set the variable, and `Cluster` has checked its value.
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    size = size_in_shared_memory(batch)
    _needs[loader] = size * num_batches * num_ranks
    needed = sum(_needs.values())
    if needed > _free_at_first:
        del _needs[loader]
        ranks = f" of {num_ranks} ranks" if num_ranks > 1 else ""
        raise UserError(
            f"--num-workers {loader.num_workers}: the batches of the workers{ranks} need up to "
            f"{needed:,} bytes of shared memory, {size:,} each, and {FOLDER} had "
            f"{_free_at_first:,} bytes free. {_REMEDY}"
        )


def size_in_shared_memory(batch: Any) -> int:
    """Returns the bytes of shared memory that a batch takes when a process sends the batch."""
    import torch

    storages: dict[int, int] = {}

    def visit(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            storage = part.untyped_storage()  # sending a view sends its whole storage
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(part, dict | list | tuple):
            for value in part.values() if isinstance(part, dict) else part:
                visit(value)

    visit(batch)
    return sum(-(-size // _PAGE) * _PAGE for size in storages.values())


def exit_on_failed_send() -> None:
    """Makes a data loader worker exit if it cannot send a batch to the main process.

    A worker's queue sends batches in a thread. On an error in this thread, Python's default is to
    print the error and drop the batch. The main process would then wait for the batch forever.
    """
    from multiprocessing.queues import Queue

    def exit_with_traceback(error: BaseException, obj: object) -> NoReturn:
        traceback.print_exception(error)
        os._exit(SEND_FAILED)

    replace(Queue, "_on_queue_feeder_error", staticmethod(exit_with_traceback))


def why_worker_ended(error: BaseException) -> str | None:
    """Returns why a data loader worker ended; None if an error has another cause."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 100:  # a chain of causes can be a circle
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    if any("unable to allocate shared memory" in text for text in texts):
        return f"a data loader worker could not send a batch, and {_shared_memory()}"
    text = next((text for text in reversed(texts) if text.startswith("DataLoader ")), None)
    if text is None:
        return None
    if found := re.search(r"timed out after (\d+) seconds", text):
        return f"no data loader worker delivered a batch within {found[1]} s"
    pids = re.search(r"\(pid(?:\(s\))? ([\d, ]+)\)", text)
    worker = f"data loader worker (pid {pids[1]})" if pids else "a data loader worker"
    if f"exit code {SEND_FAILED}." in text or f"exit code: {SEND_FAILED}." in text:
        return f"{worker} could not send a batch, and {_shared_memory()}"
    if killed := re.search(r"killed by signal: (.+?)\. ", text + " "):
        by = {signal.strsignal(number): number for number in signal.Signals}
        name = by[killed[1]].name if killed[1] in by else killed[1]
        if name == "SIGBUS":  # the system could not provide a page of shared memory
            return f"{worker} was killed by SIGBUS, and {_shared_memory()}"
        if name == "SIGKILL":
            name += ": the machine may be short of memory. Use fewer --num-workers."
        return f"{worker} was killed by {name}"
    return f"{worker} ended unexpectedly"


def _shared_memory() -> str:
    try:
        status = os.statvfs(FOLDER)
    except OSError as error:
        return f"{FOLDER} cannot be used ({error.strerror}). {_REMEDY}"
    free, size = (count * status.f_frsize for count in (status.f_bavail, status.f_blocks))
    return f"{FOLDER} has {free:,} of {size:,} bytes free. {_REMEDY}"
