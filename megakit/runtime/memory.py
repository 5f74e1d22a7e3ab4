"""Memory: what Python's garbage collector searches, and what freed tensors leave behind."""

import ctypes
import gc

#: Of glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def suspend_collector() -> None:
    """Before the imports: they make a million objects that stay, each search among which is lost.

    Without this, importing NeMo takes over a second longer.
    """
    gc.disable()


def resume_collector() -> None:
    """After the imports: collects again, but never looks at what is there by now."""
    gc.freeze()
    gc.enable()


def keep_freed_memory() -> None:
    """Lets the tensors of a step take the memory of the step before, whichever thread freed it.

    By default glibc gives the memory of large tensors back to the system, and new memory to each
    thread. Every page of it is then set up anew at every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    for name, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, 1 << 30)):
        mallopt(name, value)
