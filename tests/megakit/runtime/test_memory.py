"""What becomes of freed memory, in pages that the system set up."""

import pytest

from tests.scripts import output_of

#: A thread makes tensors of 40 MiB; another frees them.
PROGRAM = """
import resource
from concurrent.futures import ThreadPoolExecutor
import torch
from megakit.runtime.memory import keep_freed_memory

def pages():
    with ThreadPoolExecutor(1) as thread:
        make = lambda: thread.submit(lambda: torch.ones(10 << 20)).result()
        for _ in range(10):
            make()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            make()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = pages()
keep_freed_memory()
print(given_back, pages())
"""


def test_it_is_used_again_whichever_thread_freed_it() -> None:
    given_back, kept = map(int, output_of(PROGRAM).split())
    if given_back < 20_000:
        pytest.skip(f"this C library keeps freed memory by itself: {given_back} pages")
    assert kept < given_back / 4
