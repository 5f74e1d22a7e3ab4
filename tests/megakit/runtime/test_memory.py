"""The garbage collector, and what becomes of freed memory, in pages that the system set up."""

import gc

import pytest

from megakit.runtime.memory import resume_collector, suspend_collector
from tests.scripts import output_of

#: A thread makes tensors of 40 MiB; another frees them.
PROGRAM = """
import resource, sys
from concurrent.futures import ThreadPoolExecutor
import torch
from megakit.runtime.memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
with ThreadPoolExecutor(1) as thread:
    make = lambda: thread.submit(lambda: torch.ones(10 << 20)).result()
    for _ in range(10):
        make()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        make()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_the_collector_rests_during_imports_and_never_looks_at_what_they_made() -> None:
    assert gc.isenabled()
    try:
        suspend_collector()
        assert not gc.isenabled()
        kept = [[]]  # type: ignore[var-annotated]
        assert any(one is kept for one in gc.get_objects())
        resume_collector()
        assert gc.isenabled()
        assert not any(one is kept for one in gc.get_objects())
    finally:
        gc.enable()
        gc.unfreeze()


def pages(how: str) -> int:
    return int(output_of(PROGRAM, how))


def test_it_is_used_again_whichever_thread_freed_it() -> None:
    if (given := pages("given back")) < 20_000:
        pytest.skip(f"this C library keeps freed memory by itself: {given} pages")
    assert pages("kept") < given / 4
