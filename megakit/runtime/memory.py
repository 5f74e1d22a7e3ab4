"""Reduces the time that Python's garbage collector and memory allocation take."""

import ctypes
import gc

#: Parameters of `mallopt`, from glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def suspend_collector() -> None:
    """Turns garbage collection off during imports, whose million objects remain: saves a second."""
    gc.disable()


def resume_collector() -> None:
    """Turns garbage collection on after the imports, but never for objects that exist by then."""
    gc.freeze()
    gc.enable()


def keep_freed_memory() -> None:
    """Lets the tensors of a step reuse the memory of the previous step, whichever thread freed it.

    By default glibc returns the memory of large tensors to the system, and allocates separate
    memory for each thread. The system then sets up every page again at every step.
    """
    for name, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, 1 << 30)):
        ctypes.CDLL(None).mallopt(name, value)
