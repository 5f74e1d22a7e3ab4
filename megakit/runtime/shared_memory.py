"""Shared memory, through which data loader workers hand over batches, and how workers end."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from megakit.errors import UserError

FOLDER = Path("/dev/shm")  # where Linux's shm_open puts its files
#: Exit status of a worker that cannot hand over a batch.
CANNOT_HAND_OVER = 74
_PAGE = 4096
_REMEDY = (
    "Use a smaller --micro-batch-size, fewer --num-workers (0 needs no shared memory), or more "
    "shared memory (docker run --shm-size)."
)


#: Bytes that the workers of each loader may hold, and what was free before there were any.
_needs: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_free_at_first = 0


def check_room(loader: Any, batch: Any) -> None:
    """Refuses data loader workers whose batches do not fit into shared memory.

    The workers of all loaders count, as those of training keep their batches during a validation.

    Args:
        loader: A torch DataLoader with workers, none of which runs yet.
        batch: One batch, as its workers hand them over.

    Raises:
        UserError: /dev/shm is too small for the ranks of this machine.
    """
    global _free_at_first
    try:
        status = os.statvfs(FOLDER)
    except OSError:  # no such folder: torch has other means then
        return
    if not _needs:
        _free_at_first = status.f_bavail * status.f_frsize
    # Two more: the one in use, and the one that the main process has just received.
    num_batches = loader.num_workers * loader.prefetch_factor + 2
    # Every rank loads data. The launchers set the variable, and it was checked at the start.
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    size = size_in_shared_memory(batch)
    _needs[loader] = size * num_batches * num_ranks
    needed = sum(_needs.values())
    if needed > _free_at_first:
        del _needs[loader]
        ranks = f" of {num_ranks} ranks" if num_ranks > 1 else ""
        raise UserError(
            f"--num-workers {loader.num_workers}: the batches that the workers{ranks} hand over "
            f"take up to {needed:,} bytes of shared memory, {size:,} each, and {FOLDER} had "
            f"{_free_at_first:,} bytes free. {_REMEDY}"
        )


def size_in_shared_memory(batch: Any) -> int:
    """Returns the bytes that the tensors of a batch take when a process hands them over."""
    import torch

    storages: dict[int, int] = {}

    def visit(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            storage = part.untyped_storage()  # a view travels with all that it is a view of
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(part, dict):
            for value in part.values():
                visit(value)
        elif isinstance(part, list | tuple):
            for value in part:
                visit(value)

    visit(batch)
    return sum(-(-size // _PAGE) * _PAGE for size in storages.values())


def end_if_it_cannot_hand_over() -> None:
    """Has a data loader worker end if a batch does not reach the main process.

    A worker's queue hands batches over in a thread. Python's way with an error there is to print
    it and drop the batch, and the main process would wait for that batch for ever.
    """
    from multiprocessing.queues import Queue

    def end(error: BaseException, obj: object) -> NoReturn:
        import traceback

        traceback.print_exception(error)
        os._exit(CANNOT_HAND_OVER)

    Queue._on_queue_feeder_error = staticmethod(end)  # type: ignore[attr-defined]  # Python's hook


def why_worker_ended(error: BaseException) -> str | None:
    """Returns one sentence or two on the end of a data loader worker, if an error tells of one."""
    texts = [str(link) for link in _chain(error)]
    if any("unable to allocate shared memory" in text for text in texts):
        return (
            f"a data loader worker could not hand over a batch, and {_shared_memory()}. {_REMEDY}"
        )
    text = next((text for text in reversed(texts) if text.startswith("DataLoader ")), None)
    if text is None:
        return None
    if found := re.search(r"timed out after (\d+) seconds", text):
        return f"no data loader worker delivered a batch within {found[1]} s"
    pids = re.search(r"\(pid(?:\(s\))? ([\d, ]+)\)", text)
    worker = f"data loader worker (pid {pids[1]})" if pids else "a data loader worker"
    if f"exit code {CANNOT_HAND_OVER}." in text or f"exit code: {CANNOT_HAND_OVER}." in text:
        return f"{worker} could not hand over a batch, and {_shared_memory()}. {_REMEDY}"
    if killed := re.search(r"killed by signal: (.+?)\. ", text + " "):
        by = {signal.strsignal(number): number for number in signal.Signals}
        name = by[killed[1]].name if killed[1] in by else killed[1]
        if name == "SIGBUS":  # a page of shared memory that the system cannot provide
            return f"{worker} was killed by SIGBUS, and {_shared_memory()}. {_REMEDY}"
        hint = ": the machine may be short of memory. Use fewer --num-workers." * (
            name == "SIGKILL"
        )
        return f"{worker} was killed by {name}{hint}"
    return f"{worker} ended unexpectedly"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _shared_memory() -> str:
    try:
        status = os.statvfs(FOLDER)
    except OSError as error:
        return f"{FOLDER} cannot be used ({error.strerror})"
    free, size = (count * status.f_frsize for count in (status.f_bavail, status.f_blocks))
    return f"{FOLDER} has {free:,} of {size:,} bytes free"
